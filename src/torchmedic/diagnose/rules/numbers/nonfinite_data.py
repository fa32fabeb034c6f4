"""The data already contained NaN or infinity when the step began.

What: the model and the loss are correct; a value of the batch, or of a tensor that was prepared before the loop, is not
finite, so every value that is computed from it is not finite either.

Why: missing values in a file, a feature that was divided by a standard deviation of zero, the logarithm of zero, an
overflow when the data was cast, weights computed from a count of zero.

Cure: repair or drop those items, or correct the preparation step that makes them.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import noticed, rows, victim
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.bad_value_lines import Line
from torchmedic.evidence.data_makers import argument_made_at
from torchmedic.evidence.dataset_item import Fetched, datasets_in_use, fetch_again
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.preparation import line_in_collate, line_in_iteration, line_in_preparation
from torchmedic.records import Location, Treatment
from torchmedic.replay.step.trial import describe, passes
from torchmedic.replay.trace.microscope import Leaf
from torchmedic.source.assignments import names_written
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.lookup.bad_value_makers import is_next_state
from torchmedic.source.lookup.optimizers import built_at
from torchmedic.source.user_code import relative


@rule("TM220", "nonfinite-data")
def check(evidence: NumbersEvidence) -> Draft | None:
    leaf = evidence.birth.leaf if evidence.birth is not None else None
    if leaf is None or evidence.scope is None or evidence.receives(leaf) is not None:
        return None
    kind, name = evidence.name_of(leaf)
    if kind in ("parameter", "buffer") or leaf.tensor.grad_fn is not None:
        return None  # a loss that a generator hands out was computed from the weights
    bad = ~torch.isfinite(leaf.tensor.detach())
    if not bool(bad.any()) or is_next_state(evidence.step, leaf.tensor):
        return None
    what = _counted(leaf.tensor.detach(), bad)
    called = _called(evidence, leaf, kind, name)
    where = ", ".join(part for part in (rows(bad, evidence), _column(bad)) if part)
    draft = check.draft(evidence, "likely" if evidence.faithful is False else "proven")
    draft.message = f"{what} in {called} made {victim(evidence)}"
    draft.cause = (
        f"{called}, {str(leaf.tensor.dtype).removeprefix('torch.')} {list(leaf.tensor.shape)}, held {what} "
        + ("when the step got it" if evidence.taken_name else "before the step began")
    )
    item = _item(evidence, bad, kind)
    fetched = fetch_again(item) if item is not None else None
    label = f"{what}{', ' + where if where else ''}"
    draft.at(_cause(evidence, leaf, fetched, label))
    reader = evidence.scope.ops[leaf.reader].spot if leaf.reader < len(evidence.scope.ops) else None
    draft.mark(reader, "surfaced", "first used here")
    draft.because(f"{what} of {leaf.tensor.numel()} values{': ' + where if where else ''}")
    if fetched is not None:
        read = f", read from {relative(fetched.line.path)}" if fetched.line is not None and fetched.line.path else ""
        draft.because(f"dataset item {item}{read}, fetched again, is not finite")
    draft.treat(_without(evidence, bad, kind))
    draft.help("drop or repair such items, or the step of the preparation that makes them")
    return draft.because(noticed(evidence))


def _counted(tensor: torch.Tensor, bad: torch.Tensor) -> str:
    nans = int(tensor.isnan().sum().item())
    infinite = int(bad.sum().item()) - nans
    parts = [
        f"{nans} NaN" if nans else "",
        count(infinite, "infinite value") if infinite else "",
    ]
    return " and ".join(part for part in parts if part)


def _called(evidence: NumbersEvidence, leaf: Leaf, kind: str, name: str) -> str:
    field = _field(evidence.agent.batches.whole, leaf.tensor)
    if kind == "batch" and field:
        return f"the batch ({field})" if not name else f"`{name}` of the batch ({field})"
    if kind == "batch":
        return f"`{name}` of the batch" if name else "the batch"
    return f"`{name}`" if name else "a tensor from before the step"


def _field(batch: Any, tensor: torch.Tensor, depth: int = 3) -> str:
    """How the tensor is reached in the batch: `["image"]`, `[0]`."""
    if depth == 0 or batch is None or isinstance(batch, torch.Tensor):
        return ""
    parts = (
        list(batch.items())
        if isinstance(batch, dict)
        else list(enumerate(batch))
        if isinstance(batch, list | tuple)
        else []
    )
    for key, value in parts:
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            return f"field {key!r}"
        inner = _field(value, tensor, depth - 1)
        if inner:
            return f"field {key!r}, {inner}"
    return ""


def _column(bad: torch.Tensor) -> str:
    if bad.dim() != 2 or bad.shape[1] < 2:
        return ""
    hit = bad.any(0).nonzero().flatten().tolist()
    return f"column{'s' if len(hit) > 1 else ''} {', '.join(map(str, hit))}" if len(hit) <= 3 else ""


def _items(evidence: NumbersEvidence) -> tuple[Any, ...]:
    """The dataset indices of the batch."""
    items = evidence.incident.batch_indices
    return tuple(items[0]) if len(items) == 1 and isinstance(items[0], list | tuple) else tuple(items)


def _item(evidence: NumbersEvidence, bad: torch.Tensor, kind: str) -> Any:
    """The dataset index of the first bad row."""
    items = _items(evidence)
    if kind != "batch" or not bad.dim() or len(items) != bad.shape[0]:
        return None
    return items[int(bad.reshape(bad.shape[0], -1).any(1).nonzero()[0].item())]


def _cause(evidence: NumbersEvidence, leaf: Leaf, fetched: Fetched | None, label: str) -> Location | None:
    """Where the bad values were made, as far back as it can be followed."""
    line = fetched.line if fetched is not None else None
    if line is not None and not line.is_stored:
        return _at(line, label)
    found = None
    if fetched is None:
        found = line_in_collate(evidence.frames, _items(evidence)) or line_in_iteration(evidence.frames)
    if found is None:
        held = [fetched.dataset] if fetched is not None else datasets_in_use()
        held += [line.owner] if line is not None and line.owner is not None else []
        found = line_in_preparation(evidence.frames, leaf.tensor, held)
    if found is not None:
        return _at(found, label)
    if line is not None:
        return _at(line, label)
    for dataset in datasets_in_use():
        given = _given_to(evidence, dataset, label)
        if given is not None:
            return given
    scope, taken = evidence.scope, evidence.taken_name
    segment = evidence.step.runner.segment if evidence.step is not None and taken else None
    for statement in segment.statements if segment is not None else ():
        if segment is not None and taken in names_written(statement):
            return node_location("cause", segment.file, statement, f"{label}: `{taken}` comes from here")
    reader = scope.ops[leaf.reader].spot if scope is not None and leaf.reader < len(scope.ops) else None
    if reader is not None:
        return reader.location("cause", f"{label}, used here")
    return evidence.noticed.location("cause", label) if evidence.noticed is not None else None


def _given_to(evidence: NumbersEvidence, dataset: Any, label: str) -> Location | None:
    """The assignment of what a data set was built from, where one of its tensors is not finite."""
    held = getattr(dataset, "tensors", None)
    tensors = [each for each in held if isinstance(each, torch.Tensor)] if isinstance(held, list | tuple) else []
    bad = [at for at, each in enumerate(tensors) if not bool(torch.isfinite(each).all())]
    built = built_at(evidence.frames, dataset, "cause", label) if len(bad) == 1 else None
    return argument_made_at(built, bad[0], label) if built is not None else None


def _at(line: Line, label: str) -> Location:
    return place("cause", line.file, line.line, f"`{line.name}` is not finite here: {label}" if line.name else label)


def _without(evidence: NumbersEvidence, bad: torch.Tensor, kind: str) -> Treatment | None:
    """The step without the bad rows of the batch."""
    step = evidence.step
    batch = evidence.agent.batches.tensors()
    if step is None or kind != "batch" or not bad.dim() or bad.shape[0] < 2:
        return None
    keep = ~bad.reshape(bad.shape[0], -1).any(1)
    if not bool(keep.any()):
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in batch}

    def reduced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            ours = value.dim() and value.shape[0] == keep.shape[0] and value.untyped_storage()._cdata in storages
            return value[keep] if ours else value
        if type(value) in (list, tuple) and len(value) <= 64:
            return type(value)(reduced(part) for part in value)
        return (
            {key: reduced(part) for key, part in value.items()} if type(value) is dict and len(value) <= 64 else value
        )

    def change(namespace: dict[str, Any]) -> None:
        for name, value in list(namespace.items()):
            if not name.startswith("__"):
                namespace[name] = reduced(value)

    played = step.runner.play(change=change)
    if not passes(played):
        return None
    where = rows(bad, evidence)
    return Treatment(title=f"leave out {where}", safety="changes-training", proven=True, result=describe(played))
