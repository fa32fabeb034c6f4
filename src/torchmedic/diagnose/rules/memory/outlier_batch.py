"""One batch is much larger than all earlier batches.

What: the earlier batches fitted; this batch has many more elements, and memory ran out. Or the batch contains all items
of the dataset at once.

Why: a batch is padded to its longest item, and one item is much longer than the rest; images have their full
resolution; or the last batch was built differently (for example, the whole dataset as one batch).

Cure: cut or leave out items that are too long, sort or bucket items by length, or limit a batch by its number of tokens
instead of its number of items.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.memory import add_cures
from torchmedic.diagnose.rule import Draft, RuleAnswer, rule
from torchmedic.diagnose.rules.memory._table import noticed, shown
from torchmedic.diagnose.words.format import listed, size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.attempts import call_under_way, callers_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.batch_sizes import (
    Longest,
    comparable,
    giant_sample,
    is_growing,
    is_whole_data_set,
    largest_item,
    longest_row,
    unusual,
)
from torchmedic.evidence.memory.source.model_call import trained_call
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location, place

_MIN_FACTOR = 1.5
_MIN_FACTOR_PROVEN = 2.0
_MIN_SHARE_OF_BATCH = 0.5  # of all memory that is for the batch


@rule("TM406", "outlier-batch")
def check(evidence: RaisedEvidence) -> Draft | RuleAnswer | None:
    autopsy = evidence.autopsy
    if autopsy is not None and (one := _of_one_sample(evidence, autopsy)) is not None:
        return one
    if autopsy is None or autopsy.agent is None or autopsy.in_optimizer:
        return None
    grad = autopsy.builds_graph
    calls = comparable(autopsy.agent.batches.shapes, call_under_way(evidence, grad), grad)
    found = unusual(calls)
    if is_growing(calls):
        return None
    if found is None or found.factor < _MIN_FACTOR:
        return _of_everything(evidence, autopsy)
    incident = evidence.incident
    length = found.shape[1] if len(found.shape) > 1 else 0
    longest = longest_row(incident.batch, incident.batch_indices, length)
    largest = largest_item(incident.batch, incident.batch_indices)
    has, had = ("has a tensor of", "had") if calls[-1].nested else ("is", "was")
    draft = check.draft(evidence, "proven" if found.factor >= _MIN_FACTOR_PROVEN else "likely")
    draft.message = f"this batch {has} {list(found.shape)}, {found.factor:.1f} times as large as any before it"
    draft.cause = f"the largest of the {found.before} batches before it {had} {list(found.usual)}, and it fitted"
    draft.at(called_at(evidence, f"called with {list(found.shape)}"), *noticed(autopsy))
    if longest is not None:
        draft.because(_longest(longest))
    elif largest is not None:
        next_one = f"the next largest {list(largest.usual)}"
        draft.because(f"dataset item {largest.item} is {list(largest.shape)}, {next_one}")
    elif incident.batch_indices:
        draft.because(f"it is made of the dataset items {listed([str(each) for each in incident.batch_indices], 6)}")
    shown(draft, autopsy)
    dimension = found.dimension
    if dimension == 0:
        draft.help(f"limit the batch to {found.usual[0]} items, or split it and accumulate gradients")
    else:
        draft.help("cut or skip items that are too long, or build batches from items of similar size")
    cures = add_cures(draft, autopsy)
    return RuleAnswer(draft.done(), cures.plan)


def _of_one_sample(evidence: RaisedEvidence, autopsy: Autopsy) -> Draft | None:
    """A batch that was being put together: one of its samples is far larger than the others."""
    giant = giant_sample(evidence, autopsy.asked)
    if giant is None:
        return None
    who = f"dataset item {giant.item}" if giant.item is not None else f"sample {giant.position} of the batch"
    draft = check.draft(evidence, "proven" if autopsy.asked == giant.padded else "likely")
    draft.message = (
        f"{who} is {list(giant.shape)}, the other {giant.samples - 1} samples of its batch about {list(giant.usual)}"
    )
    draft.cause = f"with all {giant.samples} made as large as that one, the batch takes {size(giant.padded)}"
    draft.at(*evidence.at_user_line("cause", "all samples are made as large as the largest"))
    shown(draft, autopsy)
    return draft.help("cut or skip items that are too long, or build batches from items of similar size")


def _of_everything(evidence: RaisedEvidence, autopsy: Autopsy) -> RuleAnswer | None:
    """A batch that is not larger than others, but as large as can be: all of the data set."""
    incident, book = evidence.incident, autopsy.book
    asked = autopsy.asked or 0
    of_batch = book.total("the batch") + book.total("saved activations") + asked
    if of_batch < _MIN_SHARE_OF_BATCH * (book.everything + asked) or not is_whole_data_set(incident.batch_indices):
        return None
    number = len(incident.batch_indices)
    draft = check.draft(evidence, "proven")
    draft.message = f"this batch is the whole data set: {number} items at once"
    draft.cause = f"it and what the step makes of it take {size(of_batch)} of {size(book.everything + asked)}"
    draft.at(called_at(evidence, f"called with all {number} items"), *noticed(autopsy))
    shown(draft, autopsy)
    cures = add_cures(draft, autopsy)
    if not cures.is_help:
        draft.help("give the DataLoader a smaller `batch_size`")
    return RuleAnswer(draft.done(), cures.plan)


def _longest(longest: Longest) -> str:
    who = f"dataset item {longest.item}" if longest.item is not None else f"row {longest.row} of the batch"
    return f"{who} is {longest.length} long, the others about {longest.usual:.0f}"


def called_at(evidence: RaisedEvidence, label: str) -> Location | None:
    """The user's line that calls the root module; the first one inside it where a library calls it."""
    inside = [frame for frame in evidence.frames if frame.module is not None]
    if inside:
        callers = callers_of(evidence)
        first = (
            callers[-1] if callers and callers[-1].is_user else next((each for each in inside if each.is_user), None)
        )
        if first is not None:
            return first.location("cause", label)
    frame = evidence.user_frame
    trained = trained_call(frame) if frame is not None else None
    if frame is not None and trained is not None:
        return node_location("cause", frame.file, trained, label)
    autopsy = evidence.autopsy
    called = autopsy.called_at if autopsy is not None else None
    if called is not None:  # backward, or the loss: the call is over
        return place("cause", *called, label)
    found = evidence.at_user_line("cause", label)
    return found[0] if found else None
