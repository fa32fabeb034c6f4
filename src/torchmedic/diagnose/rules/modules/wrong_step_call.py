"""`step()` of an optimizer or a learning-rate scheduler was called with wrong arguments or too often.

What: `LBFGS` evaluates the loss several times and needs a closure that returns it; `ReduceLROnPlateau` needs the metric
that it watches; `OneCycleLR` is built for a total number of steps, and all of them are done.

Why: the optimizer or scheduler was replaced but the loop was not changed; or the loop steps a schedule more often than
the schedule was planned for.

Cure: pass the closure or the metric; plan as many steps as the loop makes.
"""

from __future__ import annotations

import inspect

import msgspec
import torch
from torch.optim import lr_scheduler

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import place
from torchmedic.source.lookup.failing_call import raising_call
from torchmedic.source.lookup.optimizers import built_at
from torchmedic.source.returns import code_of
from torchmedic.source.syntax import calls_in, has_line, syntax_tree
from torchmedic.source.user_code import is_user_file


@rule("TM179", "wrong-step-call")
def check(evidence: RaisedEvidence) -> Draft | None:
    owner = _stepped(evidence)
    draft = _nothing_returned(evidence) if isinstance(owner, torch.optim.LBFGS) else None
    if draft is not None:
        return draft
    if isinstance(owner, torch.optim.LBFGS) and "TypeError" in evidence.kinds and evidence.says("closure"):
        draft = _draft(
            evidence, "`LBFGS.step` was called without a closure", "it evaluates the loss several times itself"
        )
        draft.help(
            "pass a function that clears the gradients, computes the loss, calls `backward()` and returns the loss"
        )
    elif (
        isinstance(owner, lr_scheduler.ReduceLROnPlateau) and "TypeError" in evidence.kinds and evidence.says("metrics")
    ):
        draft = _draft(
            evidence, "`ReduceLROnPlateau.step` was called without the metric it watches", "it takes one number"
        )
        draft.help("pass it: `scheduler.step(validation_loss)`")
    elif isinstance(owner, lr_scheduler.OneCycleLR) and "ValueError" in evidence.kinds:
        done, planned = int(owner.last_epoch), int(owner.total_steps)
        if done >= planned:
            message = f"`OneCycleLR` was planned for {planned} steps, and this is one more"
            cause = f"it has made {planned} of {planned} steps"
            built = built_at(evidence.frames, owner, "origin", f"planned for {planned} steps")
            draft = check.draft(evidence, "proven", message, cause)
            if built is not None and not _is_called_by_user(evidence):  # a library makes the steps
                draft.at(msgspec.structs.replace(built, role="cause"), *evidence.at_user_line("surfaced", cause))
            else:
                draft.at(*evidence.at_user_line("cause", cause), built)
            draft.help("plan `total_steps` as epochs x batches per epoch, and step once per batch")
    return draft


def _nothing_returned(evidence: RaisedEvidence) -> Draft | None:
    """A closure of `LBFGS` that ends without `return loss`."""
    frame = next((each for each in reversed(evidence.library_frames) if each.function == "step"), None)
    if frame is None or "TypeError" not in evidence.kinds or frame.variables.get("orig_loss", frame) is not None:
        return None
    closure = frame.variables.get("closure")
    code = code_of(inspect.unwrap(closure)) if callable(closure) else None
    draft = check.draft(evidence, "proven", "the closure of `LBFGS.step` returned None, not the loss")
    draft.cause = "the optimizer compares the losses that the closure returns"
    if code is not None and is_user_file(code.co_filename):
        draft.at(place("cause", code.co_filename, code.co_firstlineno, f"`{code.co_name}` returns nothing"))
    draft.at(*evidence.at_user_line("surfaced" if draft.has_place else "cause", "the closure is called here"))
    return draft.help("end the closure with `return loss`")


def _stepped(evidence: RaisedEvidence) -> object:
    """The object whose `step` the user's line calls, or whose frame raised."""
    for frame in reversed(evidence.library_frames):
        owner = frame.variables.get("self")
        if isinstance(owner, torch.optim.Optimizer | lr_scheduler.LRScheduler):
            return owner
    frame_or_none = evidence.user_frame
    call = raising_call(frame_or_none) if frame_or_none is not None else None
    return getattr(call.function, "__self__", None) if call is not None and call.op == "step" else None


def _is_called_by_user(evidence: RaisedEvidence) -> bool:
    frame = evidence.user_frame
    calls = calls_in(syntax_tree(frame.file), "step") if frame is not None else ()
    return any(has_line(call, frame.line) for call in calls if frame is not None)


def _draft(evidence: RaisedEvidence, message: str, cause: str) -> Draft:
    draft = check.draft(evidence, "proven", message, cause)
    draft.at(*evidence.at_user_line("cause", cause))
    return draft
