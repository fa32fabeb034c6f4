"""A loader that yields no batches is started again and again.

What: the loop requests the next batch, gets none, starts the loader from its beginning, and again gets none. No step is
ever made, and no error is raised.

Why: an empty dataset (a wrong path or filter, a split that rounds to zero), a batch size that is larger than the
dataset with `drop_last=True`, a sampler or an iterable dataset that is already exhausted, inside `while True` or an
endless generator around the loader.

Cure: check `len(dataset)` and `len(loader)` before training, and raise an error if they are 0. Remove `drop_last=True`
or make the batch smaller.
"""

from __future__ import annotations

from collections import Counter

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import at, stall_rule
from torchmedic.records import Location
from torchmedic.records.inside import LoopView, PyThread
from torchmedic.records.stall import Stall

_MIN_PASSES = 3


@stall_rule("TM513", "empty-loader-cycled")
def check(stall: Stall) -> Draft | None:
    inner, thread = stall.inner, stall.thread
    if inner is None or thread is None or inner.batches or inner.requests < _MIN_PASSES:
        return None
    draft = check.draft(stall, "proven")
    draft.message = "the loader yields no batch, and is started again and again"
    draft.cause = f"a batch was requested {inner.requests} times in a second, and none came"
    draft.at(_asking(thread, inner.loop))
    if inner.empty_loader:
        draft.because(inner.empty_loader)
    draft.because(f"in the loop at line {inner.loop.line}: `{inner.loop.code}`" if inner.loop is not None else "")
    return draft.help("check `len(loader)` before training; with `drop_last=True` a batch may not exceed the dataset")


def _asking(thread: PyThread, loop: LoopView | None) -> Location | None:
    """The line that asks the loader: where the thread was seen most. For a moment it is in a loop around that, too."""
    label = "the loader is empty in every iteration of this loop"
    frame = thread.user_frame
    if frame is None or loop is None or loop.file != frame.file:
        return at(frame, "cause", label)
    inside = Counter(line for line in thread.lines if loop.line <= line <= loop.end_line)
    line = inside.most_common(1)[0][0] if inside else frame.line
    return at(frame, "cause", label) if line == frame.line else line_location("cause", frame.file, line, label)
