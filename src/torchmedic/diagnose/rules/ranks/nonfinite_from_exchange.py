"""Gradients became NaN or infinite when they were combined with those of other ranks.

What: a message of another rank was not finite when it had come. Or this rank's own loss and its own gradients are
finite: the step was replayed without the other ranks. The averaged gradients, which all ranks have in common, are not
finite.

Why: another rank contributed a value that is not finite; where that rank is known, its own diagnosis is reported in
place of this one. If the gradients of all ranks are finite, their sum does not fit the dtype of the exchange: gradients
compressed to float16, or summed before they are divided by the number of ranks.

Cure: exchange gradients in float32 or bfloat16, or divide before the sum. Otherwise find the rank with the bad value.
"""

from __future__ import annotations

import ast
import math

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import described, finish, victim
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Location, Role
from torchmedic.replay.trace.microscope import Leaf
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in, syntax_tree


@rule("TM708", "nonfinite-from-exchange")
def check(evidence: NumbersEvidence) -> Draft | None:
    incident, played = evidence.incident, evidence.played
    leaf = evidence.birth.leaf if evidence.birth is not None else None
    taking = evidence.receives(leaf) if leaf is not None else None
    if leaf is not None and taking is not None:
        return _received(evidence, leaf, taking)
    if incident.quantity != "gradient" or not incident.bad or incident.damaged or evidence.births or played is None:
        return None
    same = evidence.faithful is True or played.stood_in
    if played.error is not None or not same or not math.isfinite(incident.loss or 0.0):
        return None
    averaged = _averaged_by(evidence)
    if not averaged:
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"the exchange with other ranks made {victim(evidence)}"
    draft.cause = (
        f"the step of rank {incident.rank} alone is finite; {averaged} combined its gradients with those of others"
    )
    hook = _hook_registration(evidence)
    draft.at(hook)
    if evidence.noticed is not None:
        role: Role = "cause" if hook is None else "surfaced"
        draft.at(evidence.noticed.location(role, f"noticed here, step {incident.step}"))
    draft.because(
        "the step was replayed without the other ranks; the parts of the weights that they hold were stood in for"
        if played.stood_in
        else f"replayed without the other ranks, the step of rank {incident.rank} gives the same loss"
    )
    draft.help("exchange gradients in float32 or bfloat16, and divide them before they are summed")
    return finish(draft, evidence)


def _received(evidence: NumbersEvidence, leaf: Leaf, taking: ast.stmt) -> Draft:
    """A message of another rank was not finite."""
    _, name = evidence.name_of(leaf)
    draft = check.draft(evidence, "likely", f"a message of another rank made {victim(evidence)}")
    called = f"`{name}`" if name else "the tensor"
    draft.cause = f"{called} was not finite when it had come: {described(leaf.tensor)}"
    file = evidence.step.runner.segment.file if evidence.step is not None else ""
    draft.at(node_location("cause", file, taking, "not finite after this call"))
    draft.mark(evidence.noticed, "surfaced", f"noticed here, step {evidence.incident.step}")
    draft.help("look at what the other rank sends, and at the dtypes and shapes on both sides")
    return finish(draft, evidence)


def _averaged_by(evidence: NumbersEvidence) -> str:
    """What exchanges the gradients with other ranks; empty if nothing is known to."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    if torch.distributed.get_world_size() < 2:
        return ""
    if evidence.played is not None and evidence.played.stood_in:
        return "`fully_shard`"
    if evidence.played is not None and evidence.played.exchanged:
        return "a collective after `backward`"
    bad = {id(tensor) for tensor in evidence.incident.bad}
    for module in evidence.step.runner.modules if evidence.step is not None else ():
        for each in module.modules():
            if isinstance(each, torch.nn.parallel.DistributedDataParallel) and any(
                id(parameter) in bad for parameter in each.parameters()
            ):
                return "DistributedDataParallel"
    return ""


def _hook_registration(evidence: NumbersEvidence) -> Location | None:
    """The only line of the files on the stack that tells DistributedDataParallel how to exchange gradients."""
    files = dict.fromkeys(frame.file for frame in evidence.frames if frame.is_user)
    calls = [
        node_location("cause", file, node, "the gradients are exchanged in this way")
        for file in files
        for node in calls_in(syntax_tree(file))
        if isinstance(node.func, ast.Attribute) and node.func.attr == "register_comm_hook"
    ]
    return calls[0] if len(calls) == 1 else None
