"""Which updates can be run again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchmedic.observe.numbers.windows import Copy, Window, beside


def _window(update: int, last: Any, *, is_departure: bool = False) -> Window:
    return Window(Copy(update, [], []), [last], True, is_departure)


def test_updates_that_are_pinned_are_not_run_again_twice() -> None:
    last, later = SimpleNamespace(update=9), SimpleNamespace(update=10)
    pinned = [_window(0, last, is_departure=True), _window(6, last, is_departure=True)]
    assert beside(pinned, [_window(0, last), _window(6, last)]) == pinned
    present = [_window(0, later), _window(6, later)]
    assert beside(pinned, present) == [*pinned, *present]
