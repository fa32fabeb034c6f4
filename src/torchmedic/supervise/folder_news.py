"""A cheap check for changes in a folder. It runs several times a second, so it must cost less than a listing."""

from __future__ import annotations

import os
import time
from pathlib import Path

_COARSE_NS = 1_000_000_000
_UNCHECKED_NS = 10_000_000_000


class FolderNews:
    """Remembers when each folder last changed and when it was last checked.

    Some file systems store coarse times, and network file systems report changes late. So a folder that changed within
    the last second counts as changed, and so does a folder that was not checked for ten seconds.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, int]] = {}

    def may_have_changed(self, folder: Path) -> bool:
        now = time.time_ns()
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            changed = now
        before, looked = self._known.get(folder, (0, 0))
        if changed == before and now - looked < _UNCHECKED_NS and looked - changed > _COARSE_NS:
            return False
        self._known[folder] = (changed, now)
        return True
