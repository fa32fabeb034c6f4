"""A checkpointed function behaved differently when backward computed it again.

What: activation checkpointing discards what the forward pass saved and computes it again in backward. Both runs must
save the same tensors, in number, shape and dtype.

Why: the function depends on something that changes between the two runs: a counter, a cache that grows, a random number
from Python or NumPy (only the random state of torch is restored), a flag, or a data-dependent branch.

Cure: make the function depend only on its inputs: decide outside the function and pass the decision in.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Iterator

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import dtype
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.checkpoints import Checkpoint, Difference, Ran, deciding, difference, watch_checkpoints
from torchmedic.source.live_frames import node_location

_MAX_REPLAYS = 12  # what depends on chance does not differ in every replay


@rule("TM114", "checkpoint-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "CheckpointError" not in evidence.kinds or not (
        evidence.says("different number of tensors") or evidence.says("recomputed", "different metadata")
    ):
        return None
    failure = BackwardFailure(evidence)
    found, calls = _replayed(failure)
    draft = check.draft(
        evidence,
        "proven" if found is not None else "likely",
        "a checkpointed function did something else when it was computed again",
        _why(found[1]) if found is not None else "it saved other tensors in backward than in the forward pass",
    )
    if found is not None:
        checkpoint, first = found
        _place(draft, first)
        draft.at(checkpoint.spot.location("origin", "checkpointed here") if checkpoint.spot is not None else None)
        draft.because(f"replayed: call {_number(checkpoint, first)} of the function was the first to differ")
    else:
        spots = [call.spot for call in calls if call.spot is not None]
        if spots:
            draft.at(spots[-1].location("cause", "the function that is checkpointed here"))
        elif failure.caller is not None:
            draft.at(failure.caller.location("cause", "noticed here"))
        draft.because(f"the step could not be replayed: {failure.why_not}" if failure.why_not else "")
        draft.because("\n".join(evidence.message.splitlines()[:4])[:300])
    if failure.caller is not None:
        draft.at(failure.caller.location("surfaced", "computed again here"))
    return draft.help(
        "make the function depend on its inputs alone: decide before the checkpoint, and pass the decision in"
    )


def _replayed(failure: BackwardFailure) -> tuple[tuple[Checkpoint, Difference] | None, list[Checkpoint]]:
    seen: list[Checkpoint] = []
    step = failure.replay()
    if step is None:
        return None, seen
    for number in range(_MAX_REPLAYS):
        if time.monotonic() > failure.deadline:
            break
        seen = []
        played = step.runner.play(_other_chance(number), watch_checkpoints(seen))
        if type(played.error).__name__ != "CheckpointError":
            continue
        for checkpoint in reversed(seen):
            found = difference(checkpoint)
            if found is not None:
                return (checkpoint, found), seen
    return None, seen


@contextlib.contextmanager
def _other_chance(number: int) -> Iterator[None]:
    """Python's and NumPy's random numbers are set back before every replay; let each of them draw others."""
    numpy = sys.modules.get("numpy")
    for _ in range(number):
        random.random()
        if numpy is not None:
            numpy.random.random()
    yield


def _why(found: Difference) -> str:
    return f"in the forward pass it went on with {_said(found.original)}, in backward with {_said(found.again)}"


def _said(ran: Ran | None) -> str:
    if ran is None:
        return "nothing"
    shapes = ", ".join(f"{list(size)} {dtype(kind)}" for size, kind in (ran.outputs or ())[:2])
    line = f" at line {ran.spot.line}" if ran.spot is not None else ""
    return f"`{ran.name}`{line}" + (f", which gave {shapes}" if shapes else "")


def _number(checkpoint: Checkpoint, found: Difference) -> int:
    ran, wanted = (
        (checkpoint.original.ran, found.original) if found.original is not None else (checkpoint.again.ran, found.again)
    )
    return 1 + next((number for number, call in enumerate(ran) if call is wanted), 0)


def _place(draft: Draft, found: Difference) -> None:
    condition = deciding(found)
    if condition is not None:
        draft.at(node_location("cause", *condition, "goes another way the second time"))
    for ran, text in ((found.original, "in the forward pass"), (found.again, "when it is computed again")):
        if ran is not None and ran.spot is not None:
            role = "cause" if condition is None and ran is (found.original or found.again) else "origin"
            draft.at(ran.spot.location(role, f"`{ran.name}` {text}"))  # type: ignore[arg-type]
