"""A tensor that backward needs was changed in place after it had been saved.

What: many operations save an input or their result to compute the gradient later. If that memory is written to before
backward reads it, the gradient would be wrong, so torch refuses.

Why: `x += ...`, `x[...] = ...`, methods that end in `_`, `inplace=True`, a write through a view of the same memory, or
`optimizer.step()` between a forward pass and its backward.

Cure: make the write out of place, write to a copy (`x = x.clone()`), or call backward before the weights are updated.
"""

from __future__ import annotations

import ast
from typing import Any

from torchmedic.diagnose.edits import out_of_place
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis, Treatment
from torchmedic.replay.backward import BackwardFailure
from torchmedic.replay.construction import built_at
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.microscope import Microscope, Op
from torchmedic.replay.trial import Edit, attempt, expression_at, passes, source_of, treatment
from torchmedic.replay.writes import Overwritten, Saved, watch_saved_tensors, writers

CODE, NAME = "TM102", "inplace-on-saved-tensor"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("modified by an inplace operation"):
        return None
    failure = BackwardFailure(evidence)
    found = _replayed(failure)
    if found is None:
        return _without_replay(evidence, failure)
    saved, written, node = found
    first = written[0]
    shape = list(saved.shape)
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"a tensor of shape {shape} that backward needs was changed in place",
        f"`{node}` reads back what the forward pass saved, but that memory was written to afterwards",
    )
    saver = saved.spot
    same_line = saver is not None and first.spot is not None and saver.line == first.spot.line
    assert first.spot is not None
    label = "written to in place here, after it was saved"
    draft.at(first.spot.location("cause", label if not same_line else "saved and then overwritten on this line"))
    if saver is not None:
        draft.at(saver.location("saver", "saved for backward here"))
    for op in written[1:4]:
        if op.spot is not None:
            draft.at(op.spot.location("writer", "written to again here"))
    if getattr(first.module, "inplace", False):
        assert first.module is not None
        name = type(first.module).__name__
        draft.at(built_at(evidence.frames, first.module, f"`{name}(inplace=True)` is built here"))
    if failure.caller is not None:
        draft.at(failure.caller.location("surfaced", "noticed here"))
    draft.because(f"replayed: {len(written)} write(s) after the save, the first by `{first.name}`")
    _treat(draft, failure, first, saved)
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _replayed(failure: BackwardFailure) -> tuple[Saved, list[Op], str] | None:
    step = failure.step
    if step is None:
        return None
    scope = Microscope(deadline=failure.deadline)
    played = step.runner.play(scope, watch_saved_tensors(scope))
    if not isinstance(played.error, Overwritten):
        return None
    saved = played.error.saved
    written = [op for op in writers(scope, saved) if op.spot is not None]
    node = played.error.node.removesuffix("0").removesuffix("Backward")
    return (saved, written, node) if written else None


def _treat(draft: Draft, failure: BackwardFailure, write: Op, saved: Saved) -> None:
    if failure.step is None or write.spot is None:
        return
    losses = [root.detach() for root in failure.roots]
    loss = float(losses[0].item()) if len(losses) == 1 and losses[0].numel() == 1 else None
    if getattr(write.module, "inplace", False) and _passes_without_inplace(failure, write.module, loss):
        title = f"build `{type(write.module).__name__}` without `inplace=True`"
        draft.treat(Treatment(title=title, proven=True, result=f"loss {loss:.5g}, all gradients finite"))
        return
    candidates = list(out_of_place(write.spot))
    if saved.spot is not None and expression_at(saved.spot) is not None:
        candidates.append(("save a copy", Edit(saved.spot, f"({source_of(saved.spot)}).clone()")))
    for title, edit in candidates:
        tried = treatment(title, attempt(failure.step, edit, same_loss=loss))
        if tried is not None:
            draft.treat(tried)
            return
    if "step" in _called(write):
        draft.help("call backward for this loss before the weights are updated, or run its forward pass again")
    else:
        draft.help("make the write out of place, or write to a clone")


def _passes_without_inplace(failure: BackwardFailure, module: Any, loss: float | None) -> bool:
    assert failure.step is not None
    module.inplace = False
    try:
        played = failure.step.again()
    finally:
        module.inplace = True
    return loss is not None and passes(played) and played.loss == loss


def _called(op: Op) -> str:
    node = expression_at(op.spot) if op.spot is not None else None
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _without_replay(evidence: RaisedEvidence, failure: BackwardFailure) -> Diagnosis:
    draft = Draft(
        CODE,
        NAME,
        "likely",
        "a tensor that backward needs was changed in place",
        "torch found that a saved tensor has a newer version than when it was saved",
    )
    if failure.caller is not None:
        draft.at(failure.caller.location("cause", "noticed here; the write is earlier"))
    draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
    draft.because(evidence.message.split(" Hint:")[0][:300])
    draft.help("look for `+=`, `x[...] =`, methods ending in `_` and `inplace=True` between forward and backward")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
