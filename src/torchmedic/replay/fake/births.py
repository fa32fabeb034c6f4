"""Storages of fake tensors from their births to their deaths, and the course of memory that they make up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Course(NamedTuple):
    """Every birth and death in order: the number of the storage, or its complement (`~number`) where it died."""

    events: list[int]
    sizes: list[int]  # bytes by number


def between(one: Course, two: Course, share: float) -> Course | None:
    """The course of a step that lies between two others, or beyond them; None if theirs are not the same.

    What a step makes grows with its batch in a straight line, storage by storage: the course of two batch sizes tells
    that of every other.
    """
    if one.events != two.events:
        return None
    pairs = zip(one.sizes, two.sizes, strict=True)
    return Course(one.events, [max(0, round(first + share * (second - first))) for first, second in pairs])


class Births:
    """Follows storages until they die. Holds no tensor and no storage.

    Args:
        course: What is written.
        died: Called with the number of a storage that has died.
    """

    def __init__(self, course: Course, died: Callable[[int], None] | None = None) -> None:
        self.written = course
        self._died = died
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # number and reference, by the identity of a storage

    def alive(self) -> list[int]:
        """The numbers of the storages that are alive."""
        return [number for number, _ in self._alive.values()]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of a tensor; None if it is not followed."""
        found = self._alive.get(id(tensor.untyped_storage()))
        return found[0] if found is not None else None

    def follow(self, tensor: torch.Tensor, nbytes: int) -> int:
        """Write the birth of a storage that is not followed yet, and its death when that comes; returns its number."""
        storage = tensor.untyped_storage()
        key = id(storage)  # the object stays the same as long as the storage lives
        number = self.add(nbytes)

        def died(_: Any) -> None:
            self.written.events.append(~number)
            self._alive.pop(key, None)
            if self._died is not None:
                self._died(number)

        # Not `StorageWeakRef`: on torch 2.6 nobody is told of the death of what one of those refers to.
        self._alive[key] = (number, weakref.ref(storage, died))
        return number

    def add(self, nbytes: int) -> int:
        """Write a birth without a storage; returns its number."""
        number = len(self.written.sizes)
        self.written.sizes.append(nbytes)
        self.written.events.append(number)
        return number
