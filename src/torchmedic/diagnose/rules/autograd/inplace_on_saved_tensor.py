"""A tensor that backward needs was changed in place after an operation had saved it.

What: many operations save an input or their result to compute the gradient later. If that memory is overwritten before
backward reads it, the gradient would be wrong, so torch raises an error.

Why: `x += ...`, `x[...] = ...`, methods that end in `_`, `inplace=True`, a write through a view of the same memory,
or `optimizer.step()` between a forward pass and its backward.

Cure: make the write out of place, write to a copy (`x = x.clone()`), or call backward before the weights are updated.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from torchmedic.diagnose.cures.edits import Candidate, copied, left_out, out_of_place
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.autograd._carried_graph import carried_in, looked_at
from torchmedic.diagnose.rules.autograd._inplace_source import built_inplace, in_place_statements
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Treatment
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Microscope, Op, Spot, storage_of
from torchmedic.replay.trace.older_graph import Import
from torchmedic.replay.trace.saved_tensors import Overwritten, Saved, watch_saved_tensors, writers
from torchmedic.source.live_frames import node_location


class Found(NamedTuple):
    """The result of the replay."""

    saved: Saved
    written: list[Op]
    node: str
    storages: frozenset[int]  # all that the step writes to


@rule("TM102", "inplace-on-saved-tensor")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("modified by an inplace operation"):
        return None
    failure = BackwardFailure(evidence)
    found = _replayed(failure)
    if found is None:
        return _of_earlier_step(failure) or _without_replay(evidence, failure)
    saved, written, node = found.saved, found.written, found.node
    first = written[0]
    draft = check.draft(evidence, "proven")
    draft.message = f"a tensor of shape {list(saved.shape)} that backward needs was changed in place"
    draft.cause = (
        f"the backward of `{node}` reads back what the forward pass saved, but that memory was written to afterwards"
    )
    draft.at(*_places(failure, found))
    draft.mark(failure.caller, "surfaced", "noticed here")
    times = "once" if len(written) == 1 else f"{len(written)} times, first"
    draft.because(f"replayed: after the save the memory was written to {times} by `{first.name}`")
    if _is_weight(failure, saved):
        draft.because("the memory is that of a weight")
    _treat(draft, failure, found)
    return draft


def _replayed(failure: BackwardFailure) -> Found | None:
    for step in failure.widen():
        scope = Microscope(deadline=failure.deadline)
        played = step.runner.play(scope, watch_saved_tensors(scope))
        if not isinstance(played.error, Overwritten):
            continue
        saved = played.error.saved
        written = [op for op in writers(scope, saved) if op.spot is not None]
        node = re.sub(r"Backward\d*$", "", played.error.node)
        storages = frozenset(storage for op in scope.ops for storage in op.written)
        if written:
            return Found(saved, written, node, storages)
    return None


def _of_earlier_step(failure: BackwardFailure) -> Draft | None:
    """Backward goes into the graph of an earlier step, that is kept, and the weights have changed since."""
    failure.replay()
    looked = looked_at(failure, spent=False) if failure.engine is not None else None
    if looked is None:
        return None
    imports, played, old, alone = looked

    def begin(history: str, _: Import) -> Draft:
        message = "backward went into the graph of an earlier step, whose tensors have changed since"
        return check.draft(failure.evidence, "proven", message, f"{history}, and backward follows it")

    draft = carried_in(begin, failure, imports, played, old, alone=alone)
    if draft is None or not draft.has_cure:
        return None
    draft.mark(failure.caller, "surfaced", "backward goes back to earlier steps")
    return draft.because("the step passes with a tensor that does not carry the graph")


def _places(failure: BackwardFailure, found: Found) -> Iterator[Location]:
    """The write, the save, and the layer that writes, the one to change first."""
    saved, written = found.saved, found.written
    first, saver = written[0], saved.spot
    assert first.spot is not None
    same_line = saver is not None and (saver.file, saver.line) == (first.spot.file, first.spot.line)
    built = built_inplace(failure.evidence.frames, first.module) if getattr(first.module, "inplace", False) else None
    layer = f"`{type(first.module).__name__}(inplace=True)`"
    if built is not None and same_line:
        # One call runs both layers, so there is nothing to change at the call.
        yield msgspec.structs.replace(built, role="cause", label=f"{layer} overwrites what the layer before saved")
        yield first.spot.location("writer", "saved and then overwritten inside this call")
        return
    label = "written to in place here, after it was saved"
    yield first.spot.location("cause", label if not same_line else "saved and then overwritten on this line")
    if saver is not None:
        yield saver.location("saver", "saved for backward here")
    for op in written[1:4]:
        if op.spot is not None:
            yield op.spot.location("writer", "written to again here")
    if built is not None:
        yield msgspec.structs.replace(built, label=f"{layer} is built here")


def _is_weight(failure: BackwardFailure, saved: Saved) -> bool:
    step = failure.step
    if step is None or saved.storage is None:
        return False
    weights = [*step.runner.parameters, *(tensor for module in step.runner.modules for tensor in module.parameters())]
    return any(storage_of(tensor) == saved.storage for tensor in weights)


def _treat(draft: Draft, failure: BackwardFailure, found: Found) -> None:
    first = found.written[0]
    if failure.step is None or first.spot is None:
        return
    trials = GraphTrials(failure, found.storages)
    treated = _without_flag(failure, trials, first.module) if getattr(first.module, "inplace", False) else None
    if treated is None and _is_weight(failure, found.saved):
        _postpone(draft, trials, first.spot)
        return
    treated = treated or trials.first(_candidates(found))
    draft.treat(treated, otherwise="make the write out of place, or write to a clone")


def _candidates(found: Found) -> Iterator[Candidate]:
    write = found.written[0].spot
    if write is not None:
        yield from out_of_place(write)
    if found.saved.spot is not None:
        saver = node_at(found.saved.spot)
        if saver is not None:
            yield "go on with a copy of what was saved", copied(found.saved.spot, saver[0])


def _postpone(draft: Draft, trials: GraphTrials, write: Spot) -> None:
    """A weight is to be written after backward: the step must pass with the same loss if it is not written before."""
    edit = left_out(write)
    verdict = trials.verdict(edit) if edit is not None else None
    if verdict is None or not verdict.passed:
        draft.help("call backward for this loss before the weights are changed, or run its forward pass again")
        return
    title = "change the weights after the last backward that needs the old ones"
    result = f"with no write before backward: {verdict.result}"
    draft.treat(Treatment(title=title, safety="changes-training", proven=True, result=result))
    draft.help("or run the forward pass again with the new weights before this backward")


def _without_flag(failure: BackwardFailure, trials: GraphTrials, module: Any) -> Treatment | None:
    assert failure.step is not None
    kind = type(module)
    alike = [
        child
        for root in failure.step.runner.modules
        for child in root.modules()
        if type(child) is kind and getattr(child, "inplace", False)
    ]

    @contextlib.contextmanager
    def not_inplace(modules: list[Any]) -> Iterator[None]:
        for child in modules:
            child.inplace = False
        try:
            yield
        finally:
            for child in modules:
                child.inplace = True

    title = f"build `{kind.__name__}` without `inplace=True`"
    return trials.under(lambda: not_inplace([module]), title) or trials.under(lambda: not_inplace(alike), title)


def _without_replay(evidence: RaisedEvidence, failure: BackwardFailure) -> Draft:
    draft = check.draft(evidence, "likely")
    draft.message = "a tensor that backward needs was changed in place"
    draft.cause = "torch found that a saved tensor has a newer version than when it was saved"
    suspects = in_place_statements(evidence)
    if len(suspects) == 1:
        file, node = suspects[0]
        draft.at(node_location("cause", file, node, "the only write in place that fits"))
        draft.mark(failure.caller, "surfaced", "noticed here")
    elif failure.caller is not None:
        draft.at(failure.caller.location("cause", "noticed here; the write is earlier"))
        draft.at(*(node_location("writer", file, node, "writes in place") for file, node in suspects[:3]))
    draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
    draft.because("a replay of the last iteration alone does not show the write" if not failure.why_not else "")
    draft.because(evidence.message.split(" Hint:")[0][:300])
    return draft.help("make the write out of place, or write to a clone")
