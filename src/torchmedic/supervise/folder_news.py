"""Whether there is something new in a folder: asked several times a second, so it must cost less than to list it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_SECOND = 1_000_000_000


class News:
    """Remembers when each folder was last changed, and last looked into.

    A file system that keeps time coarsely gives two changes the same time, and one over a network may tell of a change
    late: a folder that was changed within the last second counts as new, and so does one that was not looked into for
    as long.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int]] = {}

    def may_be_in(self, folder: Path) -> bool:
        now = time.time_ns()
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            changed = now
        before, looked = self._known.get(folder, (0, 0))
        if changed == before and now - looked < _SECOND < looked - changed:
            return False
        self._known[folder] = (changed, now)
        return True
