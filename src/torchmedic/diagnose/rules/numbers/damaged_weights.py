"""Weights or buffers already contained NaN or infinity when the step began.

What: the step itself is correct; a parameter or a buffer was not finite when the step began.

Why: memory that was never initialised (`torch.empty`), a damaged checkpoint, an initialisation that divides by zero, a
hand-written update or normalisation of the weights, running statistics that include a bad batch.

Cure: check the code that writes to that parameter before the step: its initialisation, the checkpoint, code that
changes `.data`.
"""

from __future__ import annotations

import ast
import math

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import described, noticed, victim
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.preparation import line_in_preparation
from torchmedic.records import Location
from torchmedic.replay.step.trial import source_of
from torchmedic.replay.trace.microscope import Leaf, storage_of
from torchmedic.replay.trace.values import number
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.lookup.bad_value_makers import maker_of
from torchmedic.source.lookup.layer_construction import built_at
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.syntax import nodes_in, syntax_tree

_MAKES_BAD = "makes values that are not finite"
_WRITERS = frozenset(
    "copy_ fill_ mul_ div_ add_ sub_ sqrt_ log_ uniform_ normal_ clamp_ zero_ load_state_dict pow_ reciprocal_ "
    "lerp_".split()
)


@rule("TM221", "damaged-weights")
def check(evidence: NumbersEvidence) -> Draft | None:
    leaf = evidence.birth.leaf if evidence.birth is not None else None
    if leaf is None or evidence.receives(leaf) is not None:
        return None
    kind, name = evidence.name_of(leaf)
    if kind not in ("parameter", "buffer"):
        return None
    incident = evidence.incident
    called = f"the {kind} `{name}`" if name else f"a {kind}"
    bad = int((~torch.isfinite(leaf.tensor.detach())).sum().item())
    written, sure = _written_at(evidence, leaf, name)
    late = evidence.is_unexplained and evidence.agent.finite.losses.bad_call is not None
    draft = check.draft(
        evidence, "possible" if late else "proven" if sure and evidence.faithful is not False else "likely"
    )
    finite = [loss for loss in incident.losses if math.isfinite(loss)]
    since = f"damaged before step {incident.step}" if finite or incident.step else "not finite from the start"
    draft.message = f"{called}, {since}, made {victim(evidence)}"
    draft.cause = f"{bad} of {leaf.tensor.numel()} values of {called} were not finite when the step began"
    scope = evidence.scope
    reader = scope.ops[leaf.reader].spot if scope is not None and leaf.reader < len(scope.ops) else None
    if written is not None:
        draft.at(written)
    draft.mark(reader, "surfaced" if written is not None else "cause", "used here")
    draft.because(f"`{name}` is {described(leaf.tensor.detach())}" if name else "")
    if finite:
        draft.because(f"the loss was still finite one step before ({number(finite[-1])}), so this is recent")
    else:
        draft.because("no earlier step had a finite loss, so the values were bad from the start")
    draft.because(
        "" if sure or written is None else "the line is the only one found that writes to it; that is not proven"
    )
    if late:
        draft.because(
            "on this device gradients are not looked at, so that an update may have done it; "
            "the steps before, as far as they were kept, did not when they were replayed"
        )
    if written is not None and written.label == _MAKES_BAD:
        draft.help(
            "change that line so that its values are finite: a divisor, and what a log is taken of, must not be 0"
        )
    else:
        draft.help(
            "check the code that writes to it before this step: initialisation, a checkpoint, changes of `.data`"
        )
    return draft.because(noticed(evidence))


def _written_at(evidence: NumbersEvidence, leaf: Leaf, name: str) -> tuple[Location | None, bool]:
    """The statement that is to blame, and whether that is certain."""
    attr = name.rsplit(".", maxsplit=1)[-1] if name else ""
    written = _written_in_step(evidence, leaf)
    if written is not None:
        return written, False
    writers = _writers(evidence, attr)
    owner = _owner(evidence, leaf)
    if owner is not None and not any(map(math.isfinite, evidence.incident.losses)):
        line = line_in_preparation(evidence.frames, leaf.tensor, [owner])
        if line is not None:
            return place("cause", line.file, line.line, _MAKES_BAD), True
    if len(writers) == 1:
        return writers[0], False
    made = maker_of(evidence.frames, leaf.tensor)
    if made is not None:
        return made.location("cause", f"`{made.name}` gets its values here"), True
    if owner is not None:
        found = list(attribute_assignments(type(owner), attr))
        if found:
            label = f"`{attr}` gets its values here"
            return Origin(found[-1][0], found[-1][1], attr).location("cause", label), len(found) == 1
        built = built_at(evidence.frames, owner, "built here")
        if built is not None and not writers:
            return msgspec.structs.replace(built, role="cause"), False
    return None, False


def _written_in_step(evidence: NumbersEvidence, leaf: Leaf) -> Location | None:
    """A write of the user's own to the weights inside the step, which the step before has made as well."""
    scope = evidence.scope
    storage = storage_of(leaf.tensor)
    for op in scope.ops if scope is not None and evidence.incident.step > 0 else ():
        if storage in op.written and op.spot is not None and ".step(" not in source_of(op.spot):
            return op.spot.location("cause", "written to here")
    return None


def _owner(evidence: NumbersEvidence, leaf: Leaf) -> torch.nn.Module | None:
    for root in evidence.step.runner.modules if evidence.step is not None else ():
        for module in root.modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if any(value is not None and value.data_ptr() == leaf.tensor.data_ptr() for value in own):
                return module
    return None


def _writers(evidence: NumbersEvidence, attr: str) -> list[Location]:
    """Statements of the user's files on the stack that write to a parameter of this name, or load weights."""
    found = []
    for file in dict.fromkeys(frame.file for frame in reversed(evidence.frames) if frame.is_user):
        tree = syntax_tree(file)
        for node in nodes_in(tree):
            label = _writes(node, attr)
            if label:
                found.append(node_location("cause", file, node, label))
    return found


def _writes(node: ast.AST, attr: str) -> str:
    match node:
        case ast.Call(func=ast.Attribute(attr="load_state_dict", value=target)):
            text = ast.unparse(target).lower()
            return "" if "optim" in text or text.startswith(("opt", "sched", "scaler")) else "loaded here"
        case ast.Call(func=ast.Attribute(attr=method, value=target)) if method in _WRITERS:
            text = ast.unparse(target)
            return "written to here" if attr and f".{attr}" in text and "grad" not in text else ""
        case ast.Call(func=ast.Attribute(value=value), args=[target, *_]) if ast.unparse(value).endswith("init"):
            return "initialised here" if attr and ast.unparse(target).endswith(f".{attr}") else ""
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
            text = ast.unparse(target)
            written = f".{attr}.data" in text or f".{attr}[" in text or text.endswith(f".{attr}")
            return "written to here" if attr and written and not text.startswith("self.") else ""
    return ""
