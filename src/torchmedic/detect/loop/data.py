"""The data that a loop trains on, as it is fetched."""

from __future__ import annotations

import dis
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from torchmedic.detect.loop.incident import ClassesInOrder, LoopIncident, SameBatchEveryStep, SameRandomnessInWorkers
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place

_MIN_FETCHES = 8
_RESEEDING = frozenset({"seed", "manual_seed", "get_worker_info", "setstate", "set_state", "__setattr__", "spawn"})
_MAX_LABELS = 1 << 20


def find(habits: Habits) -> Iterator[LoopIncident]:
    trained_on = list(_trained_on(habits.events))
    yield from _same_batch(trained_on)
    yield from _sorted_labels(habits, trained_on)
    yield from _same_randomness(habits, trained_on)


def _trained_on(events: list[Event]) -> Iterator[Event]:
    """Fetched batches that a call of backward has followed."""
    fetch: Event | None = None
    for event in events:
        if event.kind == "fetch":
            fetch = event
        elif event.kind == "backward" and fetch is not None:
            yield fetch
            fetch = None
        elif event.kind == "gap":
            fetch = None


def _same_batch(fetches: list[Event]) -> Iterator[LoopIncident]:
    """Every step began a new pass over the data, took its first batch and left it: always the same one."""
    last = fetches[-_MIN_FETCHES:]
    if len(last) < _MIN_FETCHES or len({event.site for event in last}) != 1:
        return
    facts = {(event.fact.items, event.fact.dataset) for event in last}
    if len(facts) != 1 or last[-1].fact.items is None:
        return
    if any(event.fact.position != 1 or (event.fact.length or 0) < 2 or not event.fact.direct for event in last):
        return
    if len({event.step for event in last}) < _MIN_FETCHES - 1:
        return  # the weights were not updated in between
    yield SameBatchEveryStep(step=last[-1].step, cause=last[-1].place, times=len(last), batches=last[-1].fact.length)


def _sorted_labels(habits: Habits, fetches: list[Event]) -> Iterator[LoopIncident]:
    """Class after class in the order of the dataset: a batch holds one class only."""
    for number in {event.fact.dataset for event in fetches}:
        of_it = [event for event in fetches if event.fact.dataset == number]
        dataset = habits.thing(number)
        start = next((event for event in of_it if event.fact.position == 1 and event.fact.items is not None), None)
        if dataset is None or start is None or len(of_it) < 4 or not start.fact.direct:
            continue
        order = start.fact.in_order
        labels = labels_of(dataset)
        if labels is None or order is None or start.fact.length < 4:
            continue
        if not bool((labels[1:] >= labels[:-1]).all()):
            continue
        classes, counts = torch.unique_consecutive(labels, return_counts=True)
        if not 2 <= len(classes) <= len(labels) // 4 or int(counts.min()) < order:
            continue
        if not torch.equal(classes, torch.arange(len(classes), dtype=classes.dtype)):
            continue  # lengths, perhaps, or groups: not the numbers of classes
        yield ClassesInOrder(
            step=start.step,
            cause=start.place,
            classes=len(classes),
            batch=order,
            length=len(labels),
            first=int(counts[0]),
        )


def _same_randomness(habits: Habits, fetches: list[Event]) -> Iterator[LoopIncident]:
    """Every worker has a copy of one generator, in the same state, and draws the same numbers from it."""
    for number in {event.fact.dataset for event in fetches}:
        fetch = next(event for event in fetches if event.fact.dataset == number)
        dataset = habits.thing(number)
        getter = getattr(type(dataset), "__getitem__", None)
        code = getattr(getter, "__code__", None)
        if fetch.fact.workers < 2 or code is None or len(fetches) < 4:
            continue
        if _RESEEDING & set(code.co_names) or any(op.opname == "STORE_ATTR" for op in dis.get_instructions(code)):
            continue
        for name, value in vars(dataset).items():
            if _is_generator(value) and name in code.co_names:
                yield SameRandomnessInWorkers(
                    step=fetch.step,
                    cause=Place(code.co_filename, code.co_firstlineno),
                    data=fetch.place,
                    name=name,
                    kind=type(value).__name__,
                    workers=fetch.fact.workers,
                    dataset=type(dataset),
                )


def _is_generator(value: Any) -> bool:
    """Whether this draws random numbers from a state of its own."""
    if isinstance(value, random.Random | torch.Generator):
        return True
    return type(value).__module__.startswith("numpy.random") and type(value).__name__ in ("Generator", "RandomState")


def labels_of(dataset: Dataset[Any]) -> torch.Tensor | None:
    """The class of every item of a dataset, where it says so without being read item by item."""
    values: Any = None
    if isinstance(dataset, TensorDataset):
        values = dataset.tensors[-1] if len(dataset.tensors) == 2 else None
    else:
        values = next((vars(dataset)[name] for name in ("targets", "labels") if name in vars(dataset)), None)
    try:
        if isinstance(values, list) and len(values) <= _MAX_LABELS and all(type(value) is int for value in values):
            values = torch.tensor(values)
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_cpu:
            return None
        if values.is_floating_point() or values.dtype is torch.bool or len(values) > _MAX_LABELS:
            return None
        return values if len(values) == len(dataset) else None  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None
