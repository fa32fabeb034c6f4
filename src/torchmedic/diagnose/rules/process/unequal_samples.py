"""The samples of a batch differ in shape, so they cannot be stacked.

What: the DataLoader makes a batch by stacking samples. All samples must have the same shape, the same keys and the same
number of parts.

Why: images of different sizes, texts or series of different lengths, a field that some items lack, or a `__len__` that
counts windows which reach beyond the end of the data.

Cure: bring every sample to one size in `__getitem__` (resize, crop, pad), or pad in a custom `collate_fn`. Let
`__len__` count whole windows only.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.data_loading import function_node, loading_of
from torchmedic.evidence.dataset_item import runs_over_its_end
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import WorkerFailure
from torchmedic.source.live_frames import place
from torchmedic.source.user_code import is_user_file

# What the stacking functions say when shapes, lengths or keys differ; with workers the batch is made in shared memory.
_REFUSALS = ("equal size", "must match", "not resizable", "same shape", "expected sequence of length")


@rule("TM821", "unequal-samples")
def check(evidence: RaisedEvidence) -> Draft | None:
    loading = loading_of(evidence)
    if loading is None or loading.failure.stage != "collate":
        return None
    failure = loading.failure
    pair = _unequal(failure.sample_shapes)
    if pair is None or not _refused(failure):
        return None
    first, second = pair
    shapes = failure.sample_shapes[first], failure.sample_shapes[second]
    names = [_name(failure, position) for position in pair]
    draft = check.draft(evidence, "proven")
    draft.message = f"samples of different shapes cannot be made into a batch: {shapes[0]} and {shapes[1]}"
    draft.cause = f"{names[0]} is {shapes[0]}, {names[1]} is {shapes[1]}"
    stacked = loading.at_user_frame("cause", "stacked here")
    counted_by = _len_of(runs_over_its_end(loading.dataset))
    if counted_by is not None:
        draft.at(place("cause", *counted_by, "counts items that reach beyond the end of the data"))
        draft.at(loading.at_samples("origin", "the samples are made here"))
        draft.because("the last items of the dataset get shorter one by one")
    elif stacked is not None:
        draft.at(stacked, loading.at_samples("origin", "the samples are made here"))
    else:
        draft.at(
            loading.at_samples("cause", f"{shapes[0]} for {names[0]}, {shapes[1]} for {names[1]}")
            or loading.at_loader("cause", "the samples of this loader differ in shape")
            or loading.at_loop("cause", "the samples of this loader differ in shape")
        )
    draft.at(loading.at_loop("surfaced", "the batch was asked for here"))
    kinds = {shape: failure.sample_shapes.count(shape) for shape in dict.fromkeys(failure.sample_shapes)}
    if len(failure.sample_shapes) > 2:
        counted = ", ".join(f"{times} x {shape}" for shape, times in list(kinds.items())[:6])
        draft.because(f"the {len(failure.sample_shapes)} samples of the batch: {counted}")
    draft.because(loading.process)
    if counted_by is not None:
        return draft.help("let `__len__` count only items that lie within the data")
    return draft.help("bring every sample to one shape before it is returned, or pad the batch in a `collate_fn`")


def _len_of(dataset: Any) -> tuple[str, int] | None:
    """The line on which the user's dataset says how many items it has."""
    code = getattr(getattr(type(dataset), "__len__", None), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    returned = [node for node in ast.walk(function_node(code) or ast.Module([], [])) if isinstance(node, ast.Return)]
    return (code.co_filename, returned[-1].lineno) if returned else None


def _refused(failure: WorkerFailure) -> bool:
    if failure.exception == "KeyError":
        return any(shape.startswith("{") for shape in failure.sample_shapes)
    return any(fragment in failure.message for fragment in _REFUSALS)


def _unequal(shapes: tuple[str, ...]) -> tuple[int, int] | None:
    """The first sample that is unlike the one before it; numbers of any type are alike."""
    alike = [re.sub(r"\b(int|float|bool)\b", "number", shape) for shape in shapes]
    for position in range(1, len(alike)):
        if alike[position] != alike[0]:
            return 0, position
    return None


def _name(failure: WorkerFailure, position: int) -> str:
    if position < len(failure.batch_indices):
        return f"dataset item {failure.batch_indices[position]}"
    return f"sample {position} of the batch"
