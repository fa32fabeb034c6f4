"""Checks of the process limits, and of the destination of the output."""

from __future__ import annotations

import math
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from torchmedic.diagnose.words.format import size
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn

_MIN_FILES = 1024  # the default of a shell
_MIN_STACK_BYTES = 8 << 20
_MIN_LOCKED_BYTES = 64 << 20
_IDLE_THREADS = 8  # threads of a process that uses torch, besides those that compute
_Limits = Callable[[int], tuple[int, int]]


def check(situation: Situation, limits: _Limits = resource.getrlimit) -> Iterator[Finding]:
    yield _open_files(limits)
    yield _processes(situation, limits)
    yield _address_space(limits)
    yield _stack(limits)
    yield _locked(limits)
    yield _core(limits)
    yield _stdout()


def _soft(limits: _Limits, which: int) -> int | None:
    """The soft limit; None for no limit."""
    value = limits(which)[0]
    return None if value in (resource.RLIM_INFINITY, -1) else value


def _open_files(limits: _Limits) -> Finding:
    limit = _soft(limits, resource.RLIMIT_NOFILE)
    if limit is not None and limit < _MIN_FILES:
        return warn("open files", f"the limit is {limit}; every tensor from a worker takes one", "ulimit -n 4096")
    return ok("open files", "no limit" if limit is None else f"the limit is {limit}")


def _processes(situation: Situation, limits: _Limits) -> Finding:
    """Check how many threads can be started. Threads count for the user's limit (not for root) and for the cgroup's."""
    needed = (situation.threads or 1) + _IDLE_THREADS + situation.workers * (_IDLE_THREADS + 1)
    left: float = math.inf
    reason = "no limit"
    soft = _soft(limits, resource.RLIMIT_NPROC)
    if soft is not None and os.geteuid() != 0:
        left, reason = soft - _tasks_of(os.getuid()), f"ulimit -u is {soft}"
    group, current = situation.pressure.pids_limit, situation.pressure.pids_current
    if group is not None and current is not None and group - current < left:
        left, reason = group - current, f"the control group's limit is {group}"
    if left is math.inf:
        return ok("processes", reason)
    reason = f"{max(int(left), 0)} more processes and threads can be made ({reason})"
    if left <= 1:
        return fail("processes", reason, "raise the limit, or end what is not needed")
    if left < needed:
        return warn("processes", f"{reason}; about {needed} are needed", "raise the limit, or use fewer workers")
    return ok("processes", reason)


def _tasks_of(user: int) -> int:
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if folder.stat().st_uid == user:
                    total += len(os.listdir(folder / "task"))
            except OSError:
                continue  # the process has ended
    return total


def _address_space(limits: _Limits) -> Finding:
    limit = _soft(limits, resource.RLIMIT_AS)
    if limit is None:
        return ok("address space", "no limit")
    return warn(
        "address space",
        f"the limit is {size(limit)}; CUDA reserves as many addresses as the host and its cards have memory",
        "ulimit -v unlimited; limit memory by a control group instead",
    )


def _stack(limits: _Limits) -> Finding:
    limit = _soft(limits, resource.RLIMIT_STACK)
    if limit is not None and limit < _MIN_STACK_BYTES:
        return warn("stack", f"the limit is {size(limit)}; freeing a deep graph needs more", "ulimit -s 8192")
    return ok("stack", "no limit" if limit is None else size(limit))


def _locked(limits: _Limits, adapters: Path = Path("/sys/class/infiniband")) -> Finding:
    """Check the limit of locked memory, which applies to InfiniBand but not to the driver's pinned memory."""
    limit = _soft(limits, resource.RLIMIT_MEMLOCK)
    try:
        infiniband = any(adapters.iterdir())
    except OSError:
        infiniband = False
    if infiniband and limit is not None and limit < _MIN_LOCKED_BYTES:
        return warn("locked memory", f"the limit is {size(limit)}, too little for InfiniBand", "ulimit -l unlimited")
    return ok("locked memory", "no limit" if limit is None else f"{size(limit)}; pinned memory does not count")


def _core(limits: _Limits) -> Finding:
    limit = _soft(limits, resource.RLIMIT_CORE)
    pattern = postmortem.core_pattern()
    if limit == 0 or pattern.startswith("|"):
        return ok("core dumps", "off; torchmedic needs none" if limit == 0 else "passed to a system program")
    ram, _ = postmortem.host_memory()
    try:
        found = os.statvfs(".")
        free = found.f_bavail * found.f_frsize
    except OSError:
        return ok("core dumps", "on")
    if free < min(ram, limit if limit is not None else ram) // 2:
        return warn(
            "core dumps",
            f"a crash writes all memory of the process, and only {size(free)} are free here",
            "ulimit -c 0",
        )
    return ok("core dumps", f"on: a crash ends only after its memory has been written ({pattern or 'core'})")


def _stdout() -> Finding:
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object that is no file
        return ok("output", "unknown destination")
    if stat.S_ISFIFO(mode):
        return ok(
            "output", "a pipe: a reader that stops reading stops the script; PYTHONUNBUFFERED=1 shows lines at once"
        )
    return ok("output", "a terminal" if stat.S_ISCHR(mode) and sys.stdout.isatty() else "a file")
