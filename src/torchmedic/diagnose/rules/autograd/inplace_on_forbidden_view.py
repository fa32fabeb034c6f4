"""A view that autograd cannot track was written to in place.

What: a view shares the memory of another tensor. To differentiate a write through a view, autograd must know how the
view was made. It does not know this for the outputs of `unbind`, `split` and `chunk`, for a view made under
`torch.no_grad()` and for a view that a custom Function returns, so it raises an error. A module with a full backward
hook returns such a view.

Why: `for row in x: row.mul_(...)`, `a, b = x.chunk(2); a += 1`, a slice taken inside `no_grad()` and changed outside,
a custom Function that returns its input, or `nn.ReLU(inplace=True)` after a layer with a hook. Changing the whole
tensor in place after it was split is the same mistake.

Cure: make the operation out of place, index the tensor itself (`x[i]`), or return a clone from the Function.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import msgspec
import torch

from torchmedic.diagnose.cures.edits import out_of_place
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._inplace_call import elsewhere, name_of, raising_spot, target_of
from torchmedic.diagnose.rules.autograd._inplace_source import built_inplace
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.backward_failure import StepFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.microscope import Microscope, Spot
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import callee, calls_in
from torchmedic.source.user_variables import user_trees

_REGISTERS = "register_full_backward_hook"
_KINDS = (
    ("returns multiple views", "the view is one of several that one operation returned"),
    ("no_grad mode", "the view was made under `torch.no_grad()`"),
    ("inference mode", "the view was made in inference mode"),
    ("custom function", "the view was returned by a custom Function"),
)


@rule("TM106", "inplace-on-forbidden-view")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("view", "modified inplace"):
        return None
    why = next((text for fragment, text in _KINDS if evidence.says(fragment)), None)
    if why is None:
        return None
    failure = StepFailure(evidence)
    if evidence.says("its base or another view of its base"):
        return _base_written(evidence, failure, why)
    target = target_of(evidence)
    hooked = _of_hooked_module(evidence, failure, target.tensor if target is not None else None)
    if hooked is not None:
        return hooked
    tensor = target.tensor if target is not None else None
    is_view = tensor is not None and tensor._is_view()
    draft = check.draft(evidence, "proven" if is_view else "likely")
    draft.message = f"{name_of(target)} is a view that cannot be written to in place"
    draft.cause = f"{why}, and autograd does not follow a write to such a view"
    draft.at(*evidence.at_user_line("cause", "written to in place"))
    draft.at(_made(failure, evidence))
    if tensor is not None and is_view and tensor._base is not None:
        draft.because(f"it has shape {shape(tensor)} and is a view of a tensor of shape {shape(tensor._base)}")
    treated = GraphTrials(failure, None).first(elsewhere(raising_spot(evidence)))
    return draft.treat(treated, otherwise=_advice(evidence))


def _of_hooked_module(evidence: RaisedEvidence, failure: StepFailure, tensor: torch.Tensor | None) -> Draft | None:
    """A module with a full backward hook gives a view of its result, so that the hook sees the gradient."""
    node = tensor.grad_fn if tensor is not None else None
    if node is None or not type(node).__name__.startswith("BackwardHookFunction"):
        return None
    layer = next((frame.module for frame in reversed(evidence.frames) if frame.module is not None), None)
    layer = layer if getattr(layer, "inplace", False) is True else None
    built = built_inplace(evidence.frames, layer)
    draft = check.draft(evidence, "proven")
    draft.message = "the result of a module with a full backward hook is written to in place"
    draft.cause = "the hook makes the result a view, and autograd does not follow a write to such a view"
    if built is not None:
        draft.at(msgspec.structs.replace(built, role="cause", label="writes to its input in place"))
    draft.at(*evidence.at_user_line("surfaced" if built is not None else "cause", "written to in place"))
    draft.at(_registered(evidence))
    trials = GraphTrials(failure, None)
    if layer is None:
        return draft.treat(trials.first(elsewhere(raising_spot(evidence))), otherwise="make the operation out of place")
    advice = f"build the `{type(layer).__name__}` with `inplace=False`"
    return draft.treat(trials.under(lambda: _out_of_place(layer), advice), otherwise=advice)


@contextlib.contextmanager
def _out_of_place(layer: torch.nn.Module) -> Iterator[None]:
    layer.inplace = False  # type: ignore[assignment]
    try:
        yield
    finally:
        layer.inplace = True  # type: ignore[assignment]


def _registered(evidence: RaisedEvidence) -> Location | None:
    """The only call of the user's that registers a full backward hook."""
    calls = [(file, node) for file, tree in user_trees() for node in calls_in(tree) if callee(node) == _REGISTERS]
    return node_location("origin", *calls[0], "the hook is registered here") if len(calls) == 1 else None


def _advice(evidence: RaisedEvidence) -> str:
    if evidence.says("custom function"):
        return "return a clone from the Function, or change the tensor out of place"
    if evidence.says("no_grad mode"):
        return "make the view and change it both inside or both outside of `torch.no_grad()`"
    return "make the operation out of place, or index the whole tensor: `x[i] = ...`"


def _made(failure: StepFailure, evidence: RaisedEvidence) -> Location | None:
    """The line that made the view, from a replay up to the failing statement."""
    if failure.step is None:
        return None
    provenance = Provenance()
    played = failure.step.runner.play(provenance)
    if played.error is None or type(played.error) is not type(evidence.error):
        return None
    # The last calls before it raised; the view is what the refused call was given.
    node = re.search(r"Output \d+ of (\w+?)(?:Backward\d*)? is a view", str(played.error))
    wanted = node[1].lower() if node else ""
    for call in reversed(provenance.calls):
        spot = call.spot
        if spot is None or not any(tensor._is_view() for tensor in call.outputs):
            continue
        if not wanted or _fits(wanted, call.name, call.outputs) or not call.grad_enabled:
            made: Location = spot.location("origin", "the view is made here")
            return made
    return None


def _fits(node: str, name: str, outputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether a call made the node that torch names: `chunk` makes a `Split`, a loop over a tensor an `Unbind`."""
    names = {re.sub(r"backward\d*$", "", type(tensor.grad_fn).__name__.lower()) for tensor in outputs if tensor.grad_fn}
    return node in names or node.startswith(name.strip("_").lower())


def _base_written(evidence: RaisedEvidence, failure: StepFailure, why: str) -> Draft | None:
    """The write came first; what raises is the next use of the view."""
    found = _writer(failure)
    grade = "proven" if found is not None else "likely"
    draft = check.draft(
        evidence,
        grade,  # type: ignore[arg-type]
        "a tensor was written to in place although a view that autograd cannot follow shares its memory",
        f"{why}; after the write its values are no longer what they were recorded as",
    )
    if found is not None:
        draft.at(found.location("cause", "writes to the memory of the view"))
        draft.at(*evidence.at_user_line("surfaced", "the view is used here"))
        treated = GraphTrials(failure, None).first(out_of_place(found))
        draft.treat(treated)
        if treated is not None:
            return draft
    else:
        draft.at(*evidence.at_user_line("cause", "the view is used here; the write is earlier"))
    return draft.help("make the write out of place, or write before the tensor is split")


def _writer(failure: StepFailure) -> Spot | None:
    """The last write of a replay to memory that had been taken a view of before."""
    if failure.step is None:
        return None
    scope = Microscope()
    failure.step.runner.play(scope)
    for write in reversed(scope.ops):
        if not write.writes or write.spot is None or write.is_backward:
            continue
        before = scope.ops[: write.index]
        if any(
            not op.writes and not op.outputs and op.inputs and op.inputs[0].storage in write.written for op in before
        ):
            return write.spot
    return None
