"""Processes outside of a run that have a hand in its waits: at the other end of a pipe, or with a lock on a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.process import ProcessView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process, waits
from torchmedic.supervise.proc.process import PROC, Stat

_MOST = 8


def at_other_ends(views: Iterable[ProcessView], *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """One look at each of those that these processes wait for and that are not among them."""
    views = tuple(views)
    own = {view.pid for view in views}
    wanted: dict[int, None] = {}
    for view in views:
        for wait in view.files:
            wanted |= dict.fromkeys(wait.peers)
        wanted |= dict.fromkeys(lock.holder for lock in view.locks if lock.holder)
    found = [process.read(pid, proc=proc) for pid in list(wanted.keys() - own)[:_MOST]]
    return waits.with_waits([view for view in found if view is not None], proc=proc)


def above(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """The parent of a process, the parent of that, and so on."""
    found: list[int] = []
    while pid > 1 and len(found) < 64:
        stat = Stat(text(f"{proc}/{pid}/stat") or "")
        if not stat:
            break
        pid = stat.number(4)
        found.append(pid)
    return tuple(found)
