"""Finds the training processes in a process tree: ranks below a launcher, a script below a shell."""

from __future__ import annotations

import contextlib
import os
import re

from torchmedic.records.inside import JobView
from torchmedic.records.process import ProcessView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process, tree
from torchmedic.supervise.proc.process import PROC

_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
_MAX_LEVELS = 3  # from a rank up: a supervisor, a shell, the launcher
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?$")
_TORCH = re.compile(r"/libtorch_cpu\.so|/libtorch_python\.so")
# Helper processes of multiprocessing, joblib and torch.compile. Their progress does not matter.
_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.semaphore_tracker",
    "multiprocessing.forkserver",
    "resource_tracker import main",
    "loky.backend.popen_loky",
    "torch/_inductor/compile_worker",
    "torch._inductor.compile_worker",
)


def is_python(view: ProcessView) -> bool:
    with contextlib.suppress(OSError):
        if _PYTHON.fullmatch(os.path.basename(os.readlink(f"{PROC}/{view.pid}/exe"))):
            return True
    return "/libpython" in (text(f"{PROC}/{view.pid}/maps") or "")


def has_torch(view: ProcessView) -> bool:
    return _TORCH.search(text(f"{PROC}/{view.pid}/maps") or "") is not None


def is_helper(view: ProcessView) -> bool:
    line = " ".join(view.command)
    return any(name in line for name in _HELPERS)


def rank_of(view: ProcessView) -> int | None:
    rank = view.environment.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def job_of(view: ProcessView) -> JobView | None:
    """The distributed job that a process belongs to, from the launcher's variables and the names of its threads."""
    rank, size = rank_of(view), view.environment.get("WORLD_SIZE", "")
    names = {thread.name for thread in view.threads}
    backend = next((each for each in ("nccl", "gloo") if any(each in name for name in names)), None)
    if rank is None or not size.isdecimal() or backend is None:
        return None
    return JobView(backend=backend, rank=rank, world_size=int(size))


def training(views: tuple[ProcessView, ...], python: set[int]) -> list[ProcessView]:
    """The training processes.

    These are the ranks of a launcher; else the topmost processes that use torch, and those that they have started to
    train too (`torch.multiprocessing.spawn`); else the topmost processes that run Python.
    """
    alive = [view for view in views if view.state not in "ZX" and view.pid in python and not is_helper(view)]
    known = {view.pid: view for view in views}
    ranks = [view for view in alive if rank_of(view) is not None and _rank_of_parent(view, known) is None]
    if ranks:
        return ranks
    users = [view for view in alive if has_torch(view)]
    chosen = users or alive
    numbers = {view.pid for view in chosen}
    top = [view for view in chosen if view.parent not in numbers]
    started = [view for view in users if view.parent in numbers and not view.is_loader_worker]
    return [*top, *started]


def root_of_job(pid: int) -> int:
    """The process whose tree holds other ranks of the same job, for one of its ranks; else the process itself.

    Ranks wait for each other, so the cause is seldom in the rank that somebody looks at.
    """
    own = process.read(pid)
    if own is None or rank_of(own) is None:
        return pid
    above = own.parent
    for _ in range(_MAX_LEVELS):
        parent = process.read(above) if above > 1 else None
        if parent is None:
            break
        if len({rank_of(view) for view in tree.tree(above) if _same_job(view, own)}) > 1:
            return above
        above = parent.parent
    return pid


def _same_job(view: ProcessView, other: ProcessView) -> bool:
    return rank_of(view) is not None and all(view.environment.get(name) == other.environment.get(name) for name in _JOB)


def _rank_of_parent(view: ProcessView, known: dict[int, ProcessView]) -> int | None:
    """The rank in the parent's environment; a worker inherits the variables of its rank."""
    parent = known.get(view.parent)
    return rank_of(parent) if parent is not None else None


def below(pid: int, views: tuple[ProcessView, ...]) -> tuple[ProcessView, ...]:
    """A process and its descendants."""
    found = {pid}
    for view in views:  # parents come before children
        if view.parent in found:
            found.add(view.pid)
    return tuple(view for view in views if view.pid in found)
