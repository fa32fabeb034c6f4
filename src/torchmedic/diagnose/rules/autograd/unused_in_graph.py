"""`autograd.grad` was asked for the gradient of a tensor that the output does not depend on.

What: `torch.autograd.grad(outputs, inputs)` follows the graph from the outputs back to the inputs. It found no path to
one of them.

Why: the input was detached or copied before it was used, `requires_grad_()` was called after it had been used, or the
output was computed from another tensor. A list of parameters may contain some that this output does not use.

Cure: compute the output from the same tensor whose gradient is requested, after `requires_grad_()`. If an input may be
unused, pass `materialize_grads=True`, which gives zeros, or `allow_unused=True`, and handle `None`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten
from torchmedic.diagnose.cures.graph_edits import call_at, uncut, with_keyword
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import origin
from torchmedic.evidence.backward_failure import BackwardFailure, StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.provenance import FunctionCall, Provenance
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.layers import roots
from torchmedic.source.objects.graph import walk
from torchmedic.source.spots import spot_of_node, spot_of_traced


@rule("TM113", "unused-in-graph")
def check(evidence: RaisedEvidence) -> Draft | None:
    untracked = evidence.says("differentiated tensor", "does not require grad")
    if "RuntimeError" not in evidence.kinds or not (untracked or evidence.says("not have been used in the graph")):
        return None
    failure = BackwardFailure(evidence)
    inputs = _inputs(failure)
    lost = [index for index, tensor in enumerate(inputs) if not _reaches(failure.roots, tensor)]
    caller = failure.caller
    texts = _texts(caller, len(inputs)) if caller is not None else []
    owned = {id(held): name for root in roots(evidence.frames) for name, held in root.named_parameters()}
    names = [
        _name(owned.get(id(inputs[index]), ""), texts[index] if index < len(texts) else "", index) for index in lost
    ]
    named = names[0] if names else "an input"
    draft = check.draft(evidence, "proven" if lost else "likely")
    draft.message = f"the gradient of {named} was asked for, but the output does not depend on it"
    draft.cause = f"no way leads back from the output to {named}" + (
        f" and {len(names) - 1} more of {len(inputs)} inputs" if len(names) > 1 else ""
    )
    found = _cut(failure, lost[0]) if lost else None
    if found is not None:
        call, why, is_cut = found
        assert call.spot is not None
        draft.at(call.spot.location("cause", why))
        draft.mark(caller, "surfaced", "asked for here")
        treated = (
            GraphTrials(StepFailure(evidence)).first(uncut(call.spot, call.name), same_loss=False) if is_cut else None
        )
        draft.treat(
            treated, otherwise="use the tensor itself" if is_cut else f"call `requires_grad_()` before {named} is used"
        )
    elif caller is not None and not _made_without_gradient(draft, evidence, caller, [inputs[index] for index in lost]):
        draft.at(caller.location("cause", f"{named} is not a part of the output's graph"))
        _advise(draft, evidence, caller, [inputs[index] for index in lost], named, some=0 < len(lost) < len(inputs))
    return draft


def _name(parameter: str, text: str, index: int) -> str:
    """A parameter by its name in the model, unless the call has a plain name for it."""
    if parameter and not text.replace(".", "_").isidentifier():
        return f"`{parameter}`"
    return f"`{text}`" if text else f"input {index}"


def _made_without_gradient(draft: Draft, evidence: RaisedEvidence, caller: Frame, lost: list[torch.Tensor]) -> bool:
    """Lead to the expression that made the input, where the input does not require a gradient."""
    made = origin(evidence, lost[0]) if lost and not lost[0].requires_grad else None
    if made is None or made.value is None or made.holds:
        return False
    draft.at(made.location("cause", f"`{made.name}` does not require a gradient"))
    draft.at(caller.location("surfaced", "asked for here"))
    title = f"call `requires_grad_()` on `{made.name}` before the output is computed from it"
    text = called(rewritten(made.file, made.value), made.value) + ".requires_grad_()"
    edit = Edit(spot_of_node(made.file, made.value), text)
    draft.treat(GraphTrials(StepFailure(evidence)).first([(title, edit)], same_loss=False), otherwise=title)
    return True


def _advise(
    draft: Draft, evidence: RaisedEvidence, caller: Frame, lost: list[torch.Tensor], named: str, *, some: bool
) -> None:
    """Nothing cut the input off: it was never used, or never could be."""
    for tensor in lost[:1]:
        kind = "requires a gradient" if tensor.requires_grad else "does not require a gradient"
        draft.because(f"{named} has shape {list(tensor.shape)} and {kind}")
        if not tensor.requires_grad:
            draft.help(f"call `requires_grad_()` on {named} before the output is computed from it")
            return
    treated = GraphTrials(StepFailure(evidence)).first(_allowed(caller), same_loss=False) if some else None
    draft.treat(treated)
    if treated is not None:
        draft.help("or leave out what this output does not use")
    else:
        draft.help(f"compute the output from {named}, or ask for the gradient of what it was computed from")


def _inputs(failure: BackwardFailure) -> list[torch.Tensor]:
    given: tuple[Any, ...] = failure.engine.variables.get("args", ()) if failure.engine is not None else ()
    inputs = given[3] if len(given) > 3 else ()
    return [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]


def _texts(caller: Frame, count: int) -> list[str]:
    """How the inputs are written in the call."""
    call = call_at(spot_of_traced(caller), "grad", "backward")
    words = {word.arg: word.value for word in call.keywords} if call is not None else {}
    node = words.get("inputs") or (call.args[1] if call is not None and len(call.args) > 1 else None)
    if node is None:
        return []
    if isinstance(node, ast.List | ast.Tuple) and not any(isinstance(part, ast.Starred) for part in node.elts):
        return [ast.unparse(part) for part in node.elts]
    text = ast.unparse(node)
    return [text] if count == 1 else [f"{text}[{index}]" for index in range(count)]


def _reaches(roots: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    if not tensor.requires_grad:
        return False
    nodes = walk(root.grad_fn for root in roots)
    if tensor.grad_fn is None:
        return any(getattr(node, "variable", None) is tensor for node in nodes) or any(root is tensor for root in roots)
    return any(node is tensor.grad_fn for node in nodes)


def _cut(failure: BackwardFailure, index: int) -> tuple[FunctionCall, str, bool] | None:
    """The call that cut the input off, or that made it require a gradient too late."""
    step = failure.replay()
    if step is None:
        return None
    provenance = Provenance()
    played = step.runner.play(provenance)
    call = played.backward_calls[-1] if played.backward_calls else None
    if call is None or index >= len(call.inputs):
        return None
    tensor = call.inputs[index]
    behind = [made for root in call.roots for made in provenance.behind(root)]
    for made in behind:
        if (
            made.is_cut
            and made.spot is not None
            and any(_comes_from(provenance, given, tensor) for given in made.inputs)
        ):
            return made, "the way back ends here", True
    used = [number for number, made in enumerate(provenance.calls) if _reads(made, tensor) and _is_in(made, behind)]
    for number, made in enumerate(provenance.calls):
        if made.name in ("requires_grad_", "requires_grad") and _reads(made, tensor) and used and number > used[0]:
            return made, "too late: it has been used before", False
    return None


def _comes_from(provenance: Provenance, tensor: torch.Tensor, origin: torch.Tensor) -> bool:
    return tensor is origin or any(_reads(call, origin) for call in provenance.behind(tensor))


def _reads(call: FunctionCall, tensor: torch.Tensor) -> bool:
    return any(given is tensor for given in call.inputs)


def _is_in(call: FunctionCall, calls: list[FunctionCall]) -> bool:
    return any(call is other for other in calls)


def _allowed(caller: Frame) -> Iterator[Candidate]:
    spot = spot_of_traced(caller)
    call = call_at(spot, "grad")
    if call is not None:
        # With `allow_unused` alone they are None, which the lines that follow may not expect.
        yield "take zeros as the gradients of unused inputs", with_keyword(spot, call, "materialize_grads")
