"""A label is outside the range of classes of the scores.

What: for each sample, a classification loss selects the score of the class that the label names. With C classes the
labels are 0 to C - 1; any other label (except `ignore_index`) has no score.

Why: labels that start at 1, a class that the last layer was not built for, a marker such as 255 or -1 for "ignore" that
was not passed to the loss, or a damaged entry in the data. On a GPU the same mistake destroys the CUDA context and is
reported at another line.

Cure: correct the label, build the last layer for one more class, or pass the marker as `ignore_index`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch

from torchmedic.diagnose.cures.ranges import RangeCures
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import made_here
from torchmedic.evidence.dataset_item import items_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.whole_number_makers import blamed, held_numbers, line_of_stray
from torchmedic.records import Location, Treatment
from torchmedic.replay.trace.values import Strays, is_whole, outside, readable, span
from torchmedic.source.lookup.layers import layer_built_at, maker_of
from torchmedic.source.lookup.origins import user_argument

_LOSSES = frozenset(
    "cross_entropy nll_loss nll_loss2d nll_loss_nd cross_entropy_loss multi_margin_loss linear_cross_entropy".split()
)
_MARKERS = (255, -1, -100)


class _Given:
    """The arguments of the loss: labels, number of classes, and the label to ignore."""

    def __init__(self, scores: Any, labels: Any, ignored: Any, classes: int | None = None) -> None:
        self.scores = scores if isinstance(scores, torch.Tensor) else None
        self.labels = labels if isinstance(labels, torch.Tensor) else None
        self.ignored = ignored if isinstance(ignored, int) else None
        self.classes = classes
        if classes is None and self.scores is not None and self.scores.dim():
            self.classes = int(self.scores.shape[1 if self.scores.dim() > 1 else 0])


@rule("TM301", "label-out-of-range")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not (evidence.kinds & {"IndexError", "RuntimeError"}):
        return None
    given = _given(evidence)
    if given is None or given.classes is None:
        return None
    labels = readable(given.labels)
    strays = None
    if labels is not None and is_whole(labels):
        strays = outside(labels, 0, given.classes, given.ignored)
    if labels is None or strays is None:
        return _from_message(evidence, given)
    return _proven(evidence, given, labels, strays)


def _given(evidence: RaisedEvidence) -> _Given | None:
    """The arguments of the loss that raised: of torch's own Python function, or of a call straight into C++."""
    last = evidence.frames[-1] if evidence.frames else None
    if last is None:
        return None
    known = last.variables
    if last.function in _LOSSES and not last.is_user:
        return _Given(known.get("input"), known.get("target"), known.get("ignore_index"))
    if isinstance(last.module, torch.nn.AdaptiveLogSoftmaxWithLoss) and evidence.says("target"):
        return _Given(None, known.get("target_", known.get("target")), None, last.module.n_classes)
    call = evidence.call
    if call is not None and call.op in _LOSSES and last.is_user:
        return _Given(call.get(0, "input"), call.get(1, "target"), call.get(4, "ignore_index"))
    return None


def _proven(evidence: RaisedEvidence, given: _Given, labels: torch.Tensor, strays: Strays) -> Draft:
    classes = given.classes or 0
    known = f"{classes} class{'es' if classes != 1 else ''}"
    valid = f"0 to {classes - 1}"
    if strays.count == 1:
        message = f"label {strays.listed} is out of range: there are {known}, {valid}"
    elif len(strays.distinct) == 1:
        message = f"label {strays.listed} ({strays.count} times) is out of range: there are {known}, {valid}"
    else:
        message = f"{strays.count} labels are out of range: there are {known}, {valid}"
    passed = user_argument(evidence.frames, given.labels)
    items = items_of(evidence.incident, labels, strays.positions)
    item = f" (dataset item {items[0]})" if items else ""
    first = strays.at(passed[1].text if passed is not None and passed[1].text.isidentifier() else "label")
    draft = check.draft(
        evidence, "proven", message, f"`{first}`{item} is {strays.values[0]}; {known} means labels {valid}"
    )
    layer = maker_of(given.scores, classes, evidence.frames) if given.scores is not None else None
    built = layer_built_at(evidence.frames, layer, f"{known} because of this layer") if layer is not None else None
    # A library computes the loss of a batch that it has read itself: the line that starts the library is innocent.
    is_setting = built is not None and passed is None and evidence.is_in_library
    made = made_here(evidence, given.labels, "comes from", whole=True)
    cause = _cause(evidence, labels, strays, classes, built, made)
    if cause is None and is_setting and built is not None:
        cause = msgspec.structs.replace(built, role="cause")
    draft.at(cause)
    draft.at(
        *evidence.at_user_line("cause" if cause is None else "surfaced", f"label {strays.values[0]} meets {known}")
    )
    draft.at(made, built)
    draft.because(_counted(labels, strays))
    if len(items) > 1:
        draft.because(f"the dataset items with such a label: {listed([str(index) for index in items], 8)}")
    _advise(draft, labels, strays, classes, item.strip(" ()"), _Cures(RangeCures(evidence), given.labels, layer))
    return draft


def _cause(
    evidence: RaisedEvidence,
    labels: torch.Tensor,
    strays: Strays,
    classes: int,
    built: Location | None,
    made: Location | None,
) -> Location | None:
    """The line that made the labels, or the layer, where the values show which is wrong; else None."""
    if len(strays.distinct) == 1 and strays.distinct[0] in _MARKERS and strays.count < strays.total:
        return None  # the loss was not told
    held = held_numbers(evidence.frames, evidence.incident, labels, strays)
    blame = blamed(labels if held is None else held.values, classes, strays.distinct, from_one="data")
    if blame == "table":
        return msgspec.structs.replace(built, role="cause") if built is not None else None
    if blame != "data":
        return None
    label = f"label {strays.values[0]} comes from here"
    found = line_of_stray(evidence.frames, evidence.incident, labels, strays, label, held)
    if found is None and made is not None and not evidence.incident.batch_indices and not made.code.startswith("for "):
        found = msgspec.structs.replace(made, role="cause")
    return found


def _counted(labels: torch.Tensor, strays: Strays) -> str:
    extent = span(labels)
    if extent is None or strays.total == 1:
        return ""
    verb = "is" if strays.count == 1 else "are"
    many = f": {strays.listed}" if strays.count > 1 else ""
    return (
        f"{strays.count} of {strays.total} labels {verb} out of range{many}; "
        f"those of this batch run from {extent[0]} to {extent[1]}"
    )


class _Cures:
    """The cures that are tried on the failing step before they are advised."""

    def __init__(self, cures: RangeCures, labels: Any, layer: torch.nn.Module | None) -> None:
        self._cures, self._labels, self._layer = cures, labels, layer

    def subtract(self, title: str) -> Treatment | None:
        return self._cures.argument(title, self._labels, "{} - 1")

    def ignore(self, title: str, marker: int) -> Treatment | None:
        return self._cures.keyword(title, "ignore_index", marker)

    def larger(self, title: str, classes: int, wanted: int) -> Treatment | None:
        return self._cures.larger(title, self._layer, classes, wanted)


def _advise(draft: Draft, labels: torch.Tensor, strays: Strays, classes: int, item: str, cures: _Cures) -> None:
    """Give only advice that the values of this batch support."""
    bad = strays.distinct
    extent = span(labels)
    enough = labels.numel() >= 3 * classes  # by chance, class 0 would be missing in less than one batch of twenty
    if bad == [classes] and extent is not None and extent[0] == 1 and enough:
        draft.because(f"no label of this batch is 0 and the highest is {classes}: these labels start at 1")
        title = "subtract 1 from the labels where they are read"
        _treat_or_help(draft, cures.subtract(title), title)
    elif len(bad) == 1 and bad[0] in _MARKERS and strays.count < strays.total:
        draft.because(f"every other label is in range, and {bad[0]} is a usual marker for `do not count this one`")
        title = f"pass `ignore_index={bad[0]}` to the loss if {bad[0]} marks what should not count"
        _treat_or_help(draft, cures.ignore(title, int(bad[0])), title)
    elif bad == [classes]:
        whose = f"label of {item}" if item and strays.count == 1 else "labels"
        title = f"correct the {whose}, or build the last layer for {classes + 1} classes if {classes} is one of them"
        _treat_or_help(draft, cures.larger(title, classes, classes + 1), title)
        if extent is not None and extent[0] == 1 and labels.numel() > 1:
            draft.help("or subtract 1 from the labels, if they begin at 1: no label of this batch is 0")
    else:
        draft.help("correct these labels, or build the last layer for as many classes as the data has")


def _treat_or_help(draft: Draft, treatment: Treatment | None, title: str) -> None:
    if treatment is not None:
        draft.treat(treatment)
    else:
        draft.help(title)


def _from_message(evidence: RaisedEvidence, given: _Given) -> Draft | None:
    """The labels cannot be read, but torch names one."""
    named = re.search(r"[Tt]arget (-?\d+) is out of bounds", evidence.message)
    if named is None:
        return None
    label = named[1]
    draft = check.draft(evidence, "likely")
    draft.message = f"label {label} is out of range: there are {given.classes} classes"
    draft.cause = f"torch names the label {label}; the labels themselves cannot be read any more"
    draft.at(*evidence.at_user_line("cause", f"label {label} meets {given.classes} classes"))
    return draft.help("correct the label, or build the last layer for as many classes as the data has")
