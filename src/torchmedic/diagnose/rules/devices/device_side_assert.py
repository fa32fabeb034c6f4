"""A GPU kernel found an invalid value and stopped the device.

What: a kernel checks its inputs: an index against the size of its table, a label against the number of classes, a
probability against 0 and 1. On the CPU a failed check is an exception at that line. On a GPU it destroys the whole CUDA
context, and the host is notified at some later line, when it next waits for the device.

Why: the same mistakes as on the CPU (an index or label out of range, an invalid probability). Here the failure could
not be reproduced on the CPU: the data was only on the device, or it depends on weights that are lost.

Cure: check the lines that are named, and the range of the values before them (`x.max().item()`). Keep the data on the
host until it is used, so that the next crash can be traced to the line.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.evidence.lost_device.kernel_match import candidates, spoken
from torchmedic.records import Location
from torchmedic.replay.shadow.cpu_shadow import Seen
from torchmedic.source.live_frames import place

_MEANING = {
    "label": ("a label was out of range", "labels must be at least 0 and below the number of classes"),
    "embedding": ("an index was out of range", "an index must be at least 0 and below the number of rows"),
    "rows": ("an index was out of range", "an index must be at least 0 and below the number of rows"),
    "index": ("an index was out of range", "an index must be within the size of the dimension"),
    "index_add": ("an index was out of range", "an index must be within the size of the dimension"),
    "compiled": ("an index was out of range", "an index must be at least 0 and below the size of the dimension"),
    "scatter_gather": ("an index was out of range", "an index must be at least 0 and below the size of the dimension"),
    "embedding_bag": ("an index was out of range", "an index must be at least 0 and below the number of rows"),
    "masked_scatter": ("a mask picks more places than there are values", "there must be a value for every place"),
    "multinomial": ("a probability was negative, infinite or NaN", "probabilities must be finite and not negative"),
    "bernoulli": ("a probability was not between 0 and 1", "probabilities must be between 0 and 1"),
    "bce": ("an input was not between 0 and 1", "`binary_cross_entropy` takes probabilities, not scores"),
}


@rule("TM320", "device-side-assert")
def check(lost: LostDevice) -> Draft | None:
    if not lost.is_assertion:
        return None
    said = lost.words[0] if lost.words else None
    found = candidates(lost)
    meaning, rule = _MEANING.get(said.family, ("", "")) if said is not None else ("", "")
    what = f"on the GPU {meaning}" if meaning else "a GPU kernel found an invalid value"
    draft = check.draft(lost, "likely" if len(found) == 1 else "possible")
    draft.message = f"{what}, and its check ended the CUDA context"
    draft.cause = _cause(found, rule)
    for seen in found[:4]:
        draft.at(_place(seen, "cause" if len(found) == 1 else "origin"))
    draft.at(lost.surfaced)
    draft.because(spoken(said) if said is not None else "")
    draft.because(*_account(lost))
    if rule:
        draft.help(f"check the values before this line: {rule}")
    return draft.help(
        "keep a copy of the data on the host (or build batches with a DataLoader), so that the value can be named"
    )


def _cause(found: list[Seen], rule: str) -> str:
    if len(found) == 1:
        return f"`{found[0].op}` is the only operation of the step that can fail in this way: {rule}"
    if found:
        return f"{len(found)} places of the step can fail in this way; which one did is not known"
    return "which operation it was is not known"


def _place(seen: Seen, role: str) -> Location:
    spot = seen.spots[0]
    label = "the only operation that can fail so" if role == "cause" else "it may have been here"
    return place(
        "cause" if role == "cause" else "origin",
        spot.file,
        spot.line,
        label,
        spot.column,
        spot.end_column,
        spot.end_line,
    )


def _account(lost: LostDevice) -> list[str]:
    """The trials, and what they did not show."""
    if lost.step is None:
        return [f"the step could not be run again on the CPU: {lost.why_not}"]
    facts = [lost.how_it_was_run]
    facts.append(lost.why_not or "it did not fail there: the failing value depends on data that was only on the device")
    if lost.shadow.others:
        shapes = [str(list(tensor.shape)) for tensor in lost.shadow.others]
        facts.append(f"lost with the device: data of shape {listed(shapes)}")
    return facts
