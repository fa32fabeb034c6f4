"""The last losses of every line that calls backward: whether training was diverging before it broke."""

from __future__ import annotations

from collections import deque
from typing import Any

_LENGTH = 100  # of the last steps
_LINES = 16


class LossTrends(dict[Any, deque[float]]):
    """By the line, or whatever else stands for the call."""

    def note(self, loss: float, key: Any) -> None:
        known = self.get(key)
        if known is None:
            if len(self) >= _LINES:
                return
            known = self[key] = deque(maxlen=_LENGTH)
        known.append(loss)
