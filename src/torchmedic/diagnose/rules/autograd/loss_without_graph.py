"""`backward()` was called on a loss that does not depend on any trainable parameter.

What: a gradient flows only through operations that autograd has recorded. The loss has no such record, because the
graph was cut somewhere between the parameters and the loss.

Why: `detach()`, `.data`, `.item()`, NumPy or `torch.tensor(...)` between the parameters and the loss; a loss of
gradients that `autograd.grad` gave without `create_graph=True`; an operation with no derivative (argmax, a comparison,
a cast to integers); a forward pass under `torch.no_grad()` or `inference_mode()`; a loss that is not computed from the
output of the model at all; or every parameter is frozen.

Cure: keep the loss in torch, in floating point and with gradients on, from the parameters to `backward()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from torchmedic.diagnose.cures.graph_edits import call_at, not_reentrant, uncut, with_gradients
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._grad_mode import gradients_always_on, where_switched_off
from torchmedic.diagnose.words.tensors import dtype, shape
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.frozen_parameters import leaves_in_reach, never_trainable, parameters_in_reach, unfrozen
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import Location, Treatment
from torchmedic.replay.isolation.outside_world import Refused
from torchmedic.replay.step.trial import source_of
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.provenance import FunctionCall, Provenance
from torchmedic.source.lookup.freezes import where_frozen
from torchmedic.source.objects.graph import leaves_behind

_MESSAGE = "the loss has no graph: no parameter can get a gradient from it"
_ON_PURPOSE = re.compile(r"target|teacher|label|baseline|momentum|ema|\bold|\bref|frozen", re.I)


class Finding:
    """Where and why the graph ends, and what to do about it."""

    def __init__(self, why: str, location: Location, facts: list[str], advice: str) -> None:
        self.why = why
        self.location = location
        self.facts = facts
        self.advice = advice
        self.others: list[Location] = []
        self.treatment: Callable[[], Treatment | None] = lambda: None
        self.is_proven = True


@rule("TM103", "loss-without-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("does not require grad", "grad_fn"):
        return None
    failure = BackwardFailure(evidence)
    provenance = Provenance()
    step = failure.replay()
    played = step.runner.play(provenance) if step is not None else None
    if step is not None and played is not None and isinstance(played.error, Refused):
        step.runner.answers_exchanges, provenance = True, Provenance()
        played = step.runner.play(provenance)
    finding = _find(failure, provenance, played.roots[-1]) if played is not None and played.roots else None
    if finding is None:
        return _nothing_found(evidence, failure)
    draft = check.draft(evidence, "proven" if finding.is_proven else "likely", _MESSAGE, finding.why)
    draft.at(finding.location, *finding.others)
    draft.mark(failure.caller, "surfaced", "backward has nothing to go back through")
    draft.because(*finding.facts)
    treated = finding.treatment()
    return draft.treat(treated, otherwise=finding.advice)


def _find(failure: BackwardFailure, provenance: Provenance, root: torch.Tensor) -> Finding | None:
    cuts = [call for call in provenance.cuts_behind(root) if call.spot is not None]
    if cuts:
        return _frozen_beside(failure, provenance, root, cuts) or _cut(failure, provenance, cuts)
    off = [call for call in provenance.behind(root) if not call.grad_enabled or call.inference]
    if off and off[-1].spot is not None and _has_trainable(failure):
        return _switched_off(failure, provenance, off[-1])
    left = [call for call in provenance.left_torch(root) if call.spot is not None]
    if left:
        return _left_torch(failure, left[0], provenance, root)
    return _all_frozen(failure, provenance, root) or _other_tensors(failure, provenance, root)


def _frozen_beside(
    failure: BackwardFailure, provenance: Provenance, root: torch.Tensor, cuts: list[FunctionCall]
) -> Finding | None:
    """Weights of one optimizer were cut off, and the loss goes through frozen weights of another one (a GAN)."""
    beyond = {id(tensor) for call in cuts for given in call.inputs for tensor in provenance.sources_behind(given)}
    beyond |= {id(leaf) for call in cuts for leaf in leaves_behind(call.inputs)}
    direct = {id(tensor) for tensor in provenance.sources_behind(root)} - beyond
    for optimizer in list(failure.evidence.incident.process.clock.optimizers):
        weights = parameters_of(optimizer)
        used = [tensor for tensor in weights if id(tensor) in direct]
        if used and not any(tensor.requires_grad for tensor in used) and not any(id(one) in beyond for one in weights):
            return _frozen(failure, used)
    return None


# Cut by a call


def _cut(failure: BackwardFailure, provenance: Provenance, cuts: list[FunctionCall]) -> Finding:
    updated = {id(tensor) for tensor in failure.step.runner.parameters} if failure.step is not None else set()

    def rank(call: FunctionCall) -> tuple[bool, bool]:
        """Sort key: first the cuts of weights that are to be trained, and that do not look intended."""
        assert call.spot is not None
        is_off = call.inference or not call.grad_enabled  # then the inputs have no graph: they are the weights
        sources = call.inputs if is_off else leaves_behind(call.inputs)
        trained = any(id(tensor) in updated for tensor in sources) or not updated
        return not trained, bool(_ON_PURPOSE.search(source_of(call.spot._replace(column=None))))

    call = min(cuts, key=rank)  # of equals, the nearest to the loss
    if call.inference or not call.grad_enabled:
        finding = _switched_off(failure, provenance, call)
    else:
        finding = _explain(failure, call)
    finding.others = [
        other.spot.location("origin", "this result has no graph")
        for other in cuts[:4]
        if other is not call and other.spot is not None
    ]
    return finding


def _explain(failure: BackwardFailure, call: FunctionCall) -> Finding:
    assert call.spot is not None
    lost = call.lost
    advice = "keep the way from the parameters to the loss inside torch"
    if call.name in ("detach", "detach_", "data"):
        why = f"`{call.name}` gives a tensor without its history"
        advice = f"leave `{call.name}` out on the way to the loss"
    elif call.name == "grad":
        why = "`autograd.grad` gives gradients without a graph unless `create_graph=True` is passed"
        advice = "pass `create_graph=True`"
    elif call.name.startswith("all_gather"):
        why = f"`{call.name}` gives tensors without a history, also for the part of this rank"
        advice = (
            "put this rank's own tensor back: `gathered[dist.get_rank()] = features`; "
            "or call `torch.distributed.nn.functional.all_gather`"
        )
    elif call.name in ("tensor", "as_tensor", "new_tensor"):
        why = f"`{call.name}` copies the values into a new tensor, which has no history"
    elif lost is not None and not (lost.is_floating_point() or lost.is_complex()):
        why = f"`{call.name}` gives {dtype(lost)} values, which have no gradient"
        advice = f"compute the loss from what is given to `{call.name}`, not from its result"
    else:
        why = f"`{call.name}` has no derivative"
    fact = f"replayed: `{call.name}` was given a tensor with a graph"
    fact += f" and gave one of shape {shape(lost)} without" if lost is not None else ""
    finding = Finding(why, call.spot.location("cause", "the graph is cut here"), [fact], advice)
    finding.treatment = lambda: GraphTrials(failure).first(uncut(call.spot, call.name)) if call.spot else None
    return finding


def _switched_off(failure: BackwardFailure, provenance: Provenance, call: FunctionCall) -> Finding:
    assert call.spot is not None
    checkpoint = next((spot for spot in call.stack if call_at(spot, "checkpoint", "checkpoint_sequential")), None)
    if checkpoint is not None and not call.inference:
        return _checkpointed(failure, checkpoint)
    mode = "inference mode" if call.inference else "`torch.no_grad()`"
    switch = where_switched_off(call.stack, failure.evidence.frames, stays=not provenance.calls[-1].grad_enabled)
    where = call.spot.location("origin")
    fact = f"replayed: `{call.name}` at {where.file}:{where.line} ran with gradients off"
    location = switch.location() if switch is not None else call.spot.location("cause", "gradients are off here")
    finding = Finding(
        f"the forward pass runs under {mode}, so nothing is recorded",
        location,
        [fact],
        "run the forward pass of the training step with gradients on",
    )
    finding.others = [call.spot.location("origin", "runs with gradients off")]

    def treat() -> Treatment | None:
        trials = GraphTrials(failure)
        if switch is not None and switch.is_block:
            tried = trials.first(with_gradients(switch.file, switch.node))
            if tried is not None:
                return tried
        return trials.under(gradients_always_on, "run the forward pass of the training step with gradients on")

    finding.treatment = treat
    return finding


def _checkpointed(failure: BackwardFailure, spot: Spot) -> Finding:
    finding = Finding(
        "a reentrant checkpoint records nothing unless one of its inputs requires a gradient, and none does",
        spot.location("cause", "no input of this checkpoint requires a gradient"),
        ["replayed: the operations inside the checkpoint ran with gradients off"],
        "pass `use_reentrant=False` to the checkpoint",
    )
    finding.treatment = lambda: GraphTrials(failure).first(not_reentrant(spot))
    return finding


def _left_torch(failure: BackwardFailure, call: FunctionCall, provenance: Provenance, root: torch.Tensor) -> Finding:
    assert call.spot is not None
    rebuilt = provenance.made_plain(root)
    name = {"__float__": "float()", "__int__": "int()", "__array__": "NumPy"}.get(call.name, f"{call.name}()")
    finding = Finding(
        f"`{name}` turns the tensor into plain numbers, which have no history",
        call.spot.location("cause", "the graph is cut here"),
        [],
        "keep the loss a tensor from the model's output to `backward()`; take its number only to show it",
    )
    if rebuilt is not None and rebuilt.spot is not None:
        finding.others = [rebuilt.spot.location("origin", "a new tensor is made of plain numbers here")]
    finding.treatment = lambda: GraphTrials(failure).first(uncut(call.spot, call.name)) if call.spot else None
    return finding


# Nothing to be cut


def _all_frozen(failure: BackwardFailure, provenance: Provenance, root: torch.Tensor) -> Finding | None:
    parameters = parameters_in_reach(failure)
    behind = {id(tensor) for tensor in provenance.sources_behind(root)}
    used = [tensor for tensor in parameters if id(tensor) in behind]
    if not used or any(tensor.requires_grad for tensor in used):
        return None
    return _frozen(failure, used)


def _frozen(failure: BackwardFailure, used: list[torch.Tensor]) -> Finding | None:
    location = where_frozen(failure.evidence.frames, used)
    if location is None and failure.caller is not None:
        location = failure.caller.location("cause", "every parameter behind this loss is frozen")
    if location is None:
        return None
    finding = Finding(
        "every parameter that the loss depends on has requires_grad=False",
        location,
        [f"replayed: the loss depends on {len(used)} parameters, none of which requires a gradient"],
        "freeze only the parameters that shall not be trained",
    )
    finding.treatment = lambda: GraphTrials(failure).under(
        lambda: unfrozen(used), "leave the parameters that shall be trained unfrozen"
    )
    return finding


def _other_tensors(failure: BackwardFailure, provenance: Provenance, root: torch.Tensor) -> Finding | None:
    """The loss is computed from tensors that were never meant to have a gradient."""
    calls = [call for call in provenance.behind(root) if call.spot is not None]
    with_graph = [call for call in provenance.calls if call.keeps_grad and call.spot is not None]
    if calls and with_graph:
        place, unused = calls[0].spot, with_graph[-1].spot
        assert place is not None
        assert unused is not None
        finding = Finding(
            "the loss is computed from tensors that no parameter leads to",
            place.location("cause", "nothing that is used here has a graph"),
            [f"replayed: {len(with_graph)} calls gave tensors with a graph, and the loss uses none of them"],
            "compute the loss from the output of the model",
        )
        finding.others = [unused.location("origin", "this has a graph, but the loss does not use it")]
        return finding
    never = never_trainable(failure, provenance, root)
    if never is None:
        return None
    name, tensor, location = never
    finding = Finding(
        f"`{name}` was made without requires_grad=True",
        location,
        ["nothing that the loss was computed from requires a gradient"],
        f"make `{name}` with `requires_grad=True`, or as an `nn.Parameter`",
    )
    finding.is_proven = failure.step is not None and any(tensor is given for given in failure.step.runner.parameters)
    finding.treatment = lambda: GraphTrials(failure).under(
        lambda: unfrozen([tensor]), f"make `{name}` with `requires_grad=True`"
    )
    return finding


def _has_trainable(failure: BackwardFailure) -> bool:
    return any(tensor.requires_grad for tensor in parameters_in_reach(failure)) or bool(leaves_in_reach(failure))


def _nothing_found(evidence: RaisedEvidence, failure: BackwardFailure) -> Draft:
    cause = "nothing that the loss was computed from requires a gradient"
    draft = check.draft(evidence, "likely", _MESSAGE, cause)
    draft.mark(failure.caller, "cause", "backward has nothing to go back through")
    draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
    return draft.help("check that the loss is computed from the model's output, with gradients on")
