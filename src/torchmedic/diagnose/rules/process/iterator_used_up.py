"""`next()` was called on an iterator that has nothing left.

What: an iterator of a DataLoader, or another one, gives its items once. `next()` asks for one more, and raises
StopIteration, whose message is empty.

Why: the loop counts its turns by a number of its own, and the loader has fewer batches: the number was computed for the
whole dataset and not for this rank's share, or for another batch size. Or the iterator is made once, and the second
epoch goes on with it.

Cure: make the iterator anew when it ends, count the turns by `len(loader)`, or write `for batch in loader:`. In a job,
all ranks need the same number.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.branches import loops_around
from torchmedic.source.lookup.failing_call import raising_call


@rule("TM823", "iterator-used-up")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.user_frame
    call = raising_call(frame) if frame is not None and evidence.kind == "StopIteration" else None
    if frame is None or call is None or call.op != "next" or len(call.arguments) != 1:
        return None
    name, iterator = call.arguments[0].text, call.arguments[0].value
    is_loader = isinstance(iterator, _BaseDataLoaderIter)
    if not isinstance(iterator, Iterator) and not is_loader:
        return None
    number = iterator._num_yielded if is_loader else 0
    draft = check.draft(evidence, "proven")
    draft.message = f"`next({name})` asks for more than the iterator has" + (f": {number} batches" if number else "")
    draft.cause = "an iterator gives each item once, and raises StopIteration when it has none left"
    draft.at(*evidence.at_user_line("cause", "no batch is left" if is_loader else "nothing is left"))
    loop = next(iter(loops_around(frame.file, frame.line)), None)
    if loop is not None:
        draft.at(line_location("origin", frame.file, loop.line, "this loop goes on for longer"))
    draft.help("make the iterator anew when it ends: `except StopIteration: batches = iter(loader)`")
    return draft.help(
        "or go round as often as there are batches: `len(loader)`, the smallest one of all ranks in a job"
    )
