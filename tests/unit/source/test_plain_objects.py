"""How many bytes a container leads to, by a few of its items; and a look at a process by a copy of it."""

from __future__ import annotations

import json
import os
import signal
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchmedic.observe.failures import forked_look
from torchmedic.observe.failures.forked_look import seen_by_copy
from torchmedic.source.objects.plain_objects import pile_of, text_bytes


class Record:
    def __init__(self, number: int) -> None:
        self.name = f"record {number}"
        self.values = [number + each for each in range(1000, 1010)]


ROW = json.dumps({"text": "word " * 40, "tokens": list(range(300, 380)), "label": 1})


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: [json.loads(ROW) for _ in range(3000)], "dict"),
        (lambda: list(range(10_000, 110_000)), "int"),
        (lambda: {f"key {number}": (number, f"value {number}") for number in range(10_000, 40_000)}, "tuple"),
        (lambda: {f"word {number}" for number in range(50_000)}, "str"),
        (lambda: [Record(number) for number in range(5000)], "Record"),
        (lambda: {name: [[1000 + each for each in range(100)] for _ in range(300)] for name in "abc"}, "list"),
    ],
)
def test_what_python_objects_take_is_told_by_some_of_them(make: Callable[[], Any], kind: str) -> None:
    tracemalloc.start()
    try:
        container = make()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    pile = pile_of(container)
    assert pile is not None
    assert (pile.items, pile.kind, pile.data) == (len(container), kind, 0)
    assert pile.nbytes == pytest.approx(taken, rel=0.25)


def test_tensors_and_arrays_are_counted_beside_and_what_is_shared_once() -> None:
    whole = torch.zeros(1000)
    shared = pile_of([whole[:10], whole[10:], np.zeros(100)])
    first = pile_of([torch.zeros(1 << 20), *(torch.zeros(1) for _ in range(60))])
    assert shared is not None
    assert first is not None
    assert (shared.data, first.data) == (4800, (4 << 20) + 240)
    assert pile_of([]) is None
    assert pile_of(whole) is None
    assert text_bytes(bytes(1 << 20)) > 1 << 20
    assert text_bytes(whole) == 0


def test_a_copy_looks_and_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look() -> bytes:
        seen.append(1)
        return str(os.getpid()).encode()

    told = seen_by_copy(look)
    assert told.isdigit()
    assert int(told) != os.getpid()
    assert seen == []
    assert not os.path.exists(f"/proc/{int(told)}")

    assert seen_by_copy(lambda: bytes(1 // 0)) == b""
    monkeypatch.setattr(forked_look, "_MAX_IDLE_SECONDS", 0.1)
    assert seen_by_copy(lambda: str(signal.pause()).encode()) == b""  # as one that waits for a lock
