"""An index is outside the range of the table.

What: an embedding, `index_select`, `gather`, `one_hot` or `x[index]` selects rows by number. A table of N rows has the
rows 0 to N - 1 (indexing with brackets also accepts -N to -1).

Why: a token that is not in the vocabulary, a sequence longer than the position table, an id that starts at 1, -1 used
as padding, or an index made for another tensor. On a GPU the same mistake destroys the CUDA context and is reported at
another line.

Cure: build the table for the highest index plus one, cut the sequence, or correct the index where it is made.
"""

from __future__ import annotations

import re

import torch

from torchmedic.diagnose.cures.ranges import RangeCures
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import made_here
from torchmedic.evidence.dataset_item import items_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.lookups import NO_BOUND, Lookup, lookup_of
from torchmedic.replay.trace.values import Strays, is_whole, outside, readable, span
from torchmedic.source.lookup.layers import table_built_at
from torchmedic.source.lookup.origins import user_argument


@rule("TM302", "index-out-of-range")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not (evidence.kinds & {"IndexError", "RuntimeError"}):
        return None
    for lookup in lookup_of(evidence.frames):
        index = readable(lookup.index)
        if index is None or not is_whole(index):
            continue
        strays = outside(index, -lookup.bound if lookup.wraps else 0, lookup.bound)
        if strays is not None:
            return _proven(evidence, lookup, index, strays)
    return _from_message(evidence)


def _proven(evidence: RaisedEvidence, lookup: Lookup, index: torch.Tensor, strays: Strays) -> Draft:
    valid = (
        f"{-lookup.bound if lookup.wraps else 0} to {lookup.bound - 1}" if lookup.bound < NO_BOUND else "0 and above"
    )
    if len(strays.distinct) == 1:
        times = f" ({strays.count} times)" if strays.count > 1 else ""
        message = f"index {strays.listed}{times} is out of range: {lookup.table_words}"
    else:
        message = f"{strays.count} indices are out of range: {lookup.table_words}"
    passed = user_argument(evidence.frames, lookup.index)
    items = items_of(evidence.incident, index, strays.positions)
    item = f" (dataset item {items[0]})" if items else ""
    first = strays.at(passed[1].text if passed is not None and passed[1].text.isidentifier() else "index")
    draft = check.draft(evidence, "proven", message, f"`{first}`{item} is {strays.values[0]}; valid is {valid}")
    draft.at(*evidence.at_user_line("cause", f"index {strays.values[0]} meets {lookup.size_words}"))
    draft.at(made_here(evidence, lookup.index, "comes from"))
    draft.at(table_built_at(evidence.frames, lookup.table, lookup.layer, f"{lookup.size_words}, set here"))
    extent = span(index)
    if extent is not None and strays.total > 1:
        verb = "is" if strays.count == 1 else "are"
        many = f": {strays.listed}" if strays.count > 1 else ""
        draft.because(
            f"{strays.count} of {strays.total} indices {verb} out of range{many}; "
            f"all of them run from {extent[0]} to {extent[1]}"
        )
    if len(items) > 1:
        draft.because(f"the dataset items with such an index: {listed([str(each) for each in items], 8)}")
    _advise(draft, lookup, index, strays, RangeCures(evidence))
    return draft


def _advise(draft: Draft, lookup: Lookup, index: torch.Tensor, strays: Strays, cures: RangeCures) -> None:
    """Only what the values of this very index bear out."""
    bound, bad = lookup.bound, strays.distinct
    length = index.shape[-1] if index.dim() else 0
    treatment = None
    if lookup.layer is not None and length > bound and _are_positions(index, length):
        draft.because(f"the indices are the positions 0 to {length - 1}: the sequence is {length} long")
        title = f"cut the sequence to {bound}, or build the table for {length} positions"
        treatment = cures.larger(title, lookup.layer, bound, length)
    elif bad == [-1]:
        draft.because("the only value out of range is -1, a usual marker for padding")
        title = "replace -1 by an index that is in range before it is looked up"
        treatment = cures.argument(title, lookup.index, "{}.clamp(min=0)", safety="changes-training")
    elif lookup.op in ("embedding", "embedding_bag"):
        rows = max([*bad, bound]) + 1
        title = f"build the table for {rows} rows if {rows - 1} is a valid index, or correct the index"
        treatment = cures.larger(title, lookup.layer, bound, rows) if min(bad) >= 0 else None
    else:
        title = "correct the index where it is made, or give the indexed tensor the size that was meant"
    draft.treat(treatment) if treatment is not None else draft.help(title)


def _are_positions(index: torch.Tensor, length: int) -> bool:
    row = index.reshape(-1, length)[0]
    return torch.equal(row, torch.arange(length, dtype=row.dtype))


def _from_message(evidence: RaisedEvidence) -> Draft | None:
    """The index cannot be read, but torch has named it."""
    named = re.search(r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)", evidence.message)
    if named is not None:
        value, _, size = named.groups()
        message = f"index {value} is out of range for a dimension of size {size}"
        cause = f"torch names the index {value} and the size {size}; the index itself could not be read"
        label = f"index {value} meets size {size}"
    elif evidence.says("index out of range in self"):
        message = "an index is out of range for the table that it is looked up in"
        cause, label = "torch says so; the index itself could not be read", "index out of range"
    else:
        return None
    draft = check.draft(evidence, "likely", message, cause)
    draft.at(*evidence.at_user_line("cause", label))
    return draft.help("correct the index where it is made, or make the table larger")
