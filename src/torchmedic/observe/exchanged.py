"""Attributes of torch that a watcher exchanges while it is armed."""

from __future__ import annotations

from typing import Any


class Exchanged:
    """Attributes of torch that are exchanged until `take_back`."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, patch: Any) -> None:
        # Most methods belong to a base class, which is torch's C code: ours stand before them.
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, patch)

    def take_back(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
