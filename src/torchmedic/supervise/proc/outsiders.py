"""Processes outside the run that the run waits for: at the other end of a pipe, or holding a file lock."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchmedic.records.process import ProcessView
from torchmedic.supervise.proc import process, waits
from torchmedic.supervise.proc.process import PROC

_MAX_OUTSIDERS = 8
_MAX_ANCESTORS = 64


def at_other_ends(views: Iterable[ProcessView], *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """The processes that the given processes wait for, without the given processes themselves."""
    views = tuple(views)
    own = {view.pid for view in views}
    wanted: dict[int, None] = {}
    for view in views:
        for wait in view.files:
            wanted |= dict.fromkeys(wait.peers)
        wanted |= dict.fromkeys(lock.holder for lock in view.locks if lock.holder)
    found = [process.read(pid, proc=proc) for pid in list(wanted.keys() - own)[:_MAX_OUTSIDERS]]
    return waits.with_waits([view for view in found if view is not None], proc=proc)


def above(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    """The ancestors of a process, nearest first."""
    found: list[int] = []
    while pid > 1 and len(found) < _MAX_ANCESTORS:
        stat = process.stat_of(pid, proc=proc)
        if not stat:
            break
        pid = stat.number(4)
        found.append(pid)
    return tuple(found)
