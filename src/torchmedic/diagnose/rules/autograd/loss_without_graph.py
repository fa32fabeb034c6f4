"""Backward was called on a loss that no parameter leads to.

What: a gradient flows only through operations that autograd has recorded. The loss has no such record, because it was
cut somewhere between the parameters and here.

Why: `detach()`, `.data`, `.item()`, NumPy or `torch.tensor(...)` on the way; an operation with no derivative (argmax, a
comparison, a cast to integers); a forward pass under `torch.no_grad()` or `inference_mode()`; or every parameter is
frozen.

Cure: keep the loss in torch, in floating point and with gradients on, from the parameters to `backward()`.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.grad_mode import where_switched_off
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis, Location
from torchmedic.replay.backward import BackwardFailure
from torchmedic.replay.cuts import FunctionCall, Provenance
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frozen import where_frozen
from torchmedic.replay.runner import Played

CODE, NAME = "TM103", "loss-without-graph"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("does not require grad", "grad_fn"):
        return None
    failure = BackwardFailure(evidence)
    provenance = Provenance()
    played = failure.step.runner.play(provenance) if failure.step is not None else None
    finding = _finding(failure, provenance, played) if played is not None and played.roots else None
    if finding is None:
        return _nothing_found(evidence, failure)
    why, location, facts = finding
    draft = Draft(CODE, NAME, "proven", "the loss has no graph: no parameter can get a gradient from it", why)
    draft.at(location)
    if failure.caller is not None:
        draft.at(failure.caller.location("surfaced", "backward has nothing to go back through"))
    draft.because(*facts)
    draft.help("keep the way from the parameters to the loss inside torch, with gradients on")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


Finding = tuple[str, Location, list[str]]


def _finding(failure: BackwardFailure, provenance: Provenance, played: Played) -> Finding | None:
    root = played.roots[-1]
    cuts = [call for call in provenance.cuts_behind(root) if call.spot is not None]
    if cuts:
        return _explain(failure, cuts[0])
    off = [call for call in provenance.behind(root) if not call.grad_enabled or call.inference]
    if off and off[-1].spot is not None and _has_trainable(failure):
        return _switched_off(failure, off[-1])
    left = [call for call in provenance.left_torch() if call.spot is not None]
    if left:
        return _left_torch(left[0], provenance, root)
    if failure.step is not None and not _has_trainable(failure):
        frozen = where_frozen(failure.evidence.frames, failure.step.runner.modules)
        if frozen is not None:
            return "every parameter that the loss depends on has requires_grad=False", frozen, []
    return None


def _explain(failure: BackwardFailure, call: FunctionCall) -> Finding | None:
    assert call.spot is not None
    if call.inference or not call.grad_enabled:
        return _switched_off(failure, call)
    if call.name in ("detach", "detach_", "data"):
        text = f"`{call.name}` gives a tensor without its history"
    elif call.outputs and not (call.outputs[0].is_floating_point() or call.outputs[0].is_complex()):
        kind = str(call.outputs[0].dtype).removeprefix("torch.")
        text = f"`{call.name}` gives {kind} values, which have no gradient"
    else:
        text = f"`{call.name}` has no derivative"
    shapes = (
        f"replayed: `{call.name}` was given a tensor with a graph and gave {list(call.outputs[0].shape)} without one"
    )
    return text, call.spot.location("cause", "the graph is cut here"), [shapes]


def _switched_off(failure: BackwardFailure, call: FunctionCall) -> Finding | None:
    assert call.spot is not None
    mode = "inference mode" if call.inference else "`torch.no_grad()`"
    where = where_switched_off(call.stack, failure.evidence.frames)
    text = f"the forward pass runs under {mode}, so nothing is recorded"
    facts = [f"`{call.name}` at {call.spot.location('origin').file}:{call.spot.line} ran with gradients off"]
    if where is None:
        return text, call.spot.location("cause", "gradients are off here"), facts
    return text, where, facts


def _left_torch(call: FunctionCall, provenance: Provenance, root: torch.Tensor) -> Finding | None:
    assert call.spot is not None
    rebuilt = provenance.made_plain(root)
    name = {"__float__": "float()", "__int__": "int()", "__array__": "NumPy"}.get(call.name, f"{call.name}()")
    facts = []
    if rebuilt is not None and rebuilt.spot is not None:
        where = rebuilt.spot.location("origin")
        facts.append(f"a new tensor is made of plain numbers by `{rebuilt.name}` at {where.file}:{where.line}")
    return (
        f"`{name}` turns the tensor into plain numbers, which have no history",
        call.spot.location("cause", "the graph is cut here"),
        facts,
    )


def _has_trainable(failure: BackwardFailure) -> bool:
    if failure.step is None:
        return False
    runner = failure.step.runner
    tensors = [*runner.parameters, *(tensor for module in runner.modules for tensor in module.parameters())]
    return any(tensor.requires_grad for tensor in tensors)


def _nothing_found(evidence: RaisedEvidence, failure: BackwardFailure) -> Diagnosis:
    draft = Draft(
        CODE,
        NAME,
        "likely",
        "the loss has no graph: no parameter can get a gradient from it",
        "nothing that the loss was computed from requires a gradient",
    )
    if failure.caller is not None:
        draft.at(failure.caller.location("cause", "backward has nothing to go back through"))
    draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
    draft.help("check that the loss is computed from the model's output, with gradients on")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
