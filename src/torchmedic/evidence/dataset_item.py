"""Fetch one item of a dataset again, and watch line by line for the first value that is not finite."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchmedic.replay.isolation.torch_state import muted
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.user_code import is_user_file

_MAX_DATASETS = 4


class Line(NamedTuple):
    """A line that gave a variable its first bad value."""

    file: str
    line: int
    name: str
    owner: Any  # `self` of the method that the line belongs to
    path: str = ""  # of the file that the values were read from, as far as a variable tells


class Fetched(NamedTuple):
    """An item that was fetched again and is bad."""

    dataset: Any
    line: Line | None  # None where the dataset holds the bad value as it is


def collations_in_use() -> list[tuple[Any, Any]]:
    """The datasets of all living loaders, each with its collate function."""
    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    for value in gc.get_objects():
        kind = type(value)
        if issubclass(kind, _BaseDataLoaderIter):  # may outlive its loader
            pair = (getattr(value, "_dataset", None), getattr(value, "_collate_fn", None))
        elif issubclass(kind, DataLoader):
            pair = (value.dataset, value.collate_fn)
        else:
            continue
        found.setdefault((id(pair[0]), id(pair[1])), pair)
    return list(found.values())


def datasets_in_use() -> list[Any]:
    """The datasets of all living loaders, those that are being iterated over first."""
    found: dict[int, Any] = {}
    alive = gc.get_objects()
    for kind, attr in ((_BaseDataLoaderIter, "_dataset"), (DataLoader, "dataset")):
        for value in alive:
            if issubclass(type(value), kind):
                dataset = getattr(value, attr, None)
                if dataset is not None:
                    found.setdefault(id(dataset), dataset)
    return list(found.values())


def fetch_again(index: Any) -> Fetched | None:
    """Fetch an item that was bad. None where no dataset in use gives a bad item for that index."""
    for dataset in datasets_in_use()[:_MAX_DATASETS]:
        if not hasattr(dataset, "__getitem__"):
            continue
        watch = Watch()
        state = torch.get_rng_state()
        try:
            with muted(), watch:
                item = dataset[index]
        except Exception:
            continue
        finally:
            torch.set_rng_state(state)
        if is_bad(item, 3):
            return Fetched(_inner(dataset), watch.found)
    return None


def _inner(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class Watch:
    """A trace function over the user's own frames."""

    def __init__(self) -> None:
        self.found: Line | None = None
        self._known: dict[FrameType, set[str]] = {}
        self._lines: dict[FrameType, int] = {}
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.found is not None or not is_user_file(frame.f_code.co_filename):
            return None
        self._known[frame] = set(_bad_names(frame))
        self._lines[frame] = frame.f_lineno
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.found is None and event in ("line", "return"):
            new = [name for name in _bad_names(frame) if name not in self._known[frame]]
            if new:
                self._note(frame, new[0])
            elif event == "return" and is_bad(argument, 3) and not self._known[frame]:
                self._note(frame, "")
            self._lines[frame] = frame.f_lineno
        return self._stepped

    def _note(self, frame: FrameType, name: str) -> None:
        values = frame.f_locals
        self.found = Line(
            frame.f_code.co_filename, self._lines[frame], name, values.get("self"), _file_in(values.values())
        )


def _bad_names(frame: FrameType) -> Iterator[str]:
    """Variables with bad values. A plain number may well be infinite: `best = inf`."""
    for name, value in list(frame.f_locals.items()):
        if name != "self" and not isinstance(value, float) and is_bad(value):
            yield name


def _file_in(values: Iterable[Any]) -> str:
    """The only file that some variables name; empty where there is none, or several."""
    found = set()
    for value in values:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(value, str | os.PathLike) and os.path.isfile(value):
                found.add(os.fspath(value))
    return found.pop() if len(found) == 1 else ""
