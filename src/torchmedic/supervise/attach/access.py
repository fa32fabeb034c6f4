"""Which process is meant, and whether we may look into it: every answer for a person is one line."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys

from torchmedic.errors import UsageError
from torchmedic.records.process import ProcessView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC

_CAPABILITY = "in a container: `docker run --cap-add SYS_PTRACE`"


def resolve(pid: int) -> int:
    """The process that a number stands for.

    Raises:
        UsageError: There is nothing to look at, or it is not for us.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("attach needs the /proc of Linux; elsewhere try `py-spy dump --pid PID`")
    status = text(f"{PROC}/{pid}/status")
    if status is None:
        raise UsageError(f"there is no process {pid} here (in a container, only its own processes can be seen)")
    with contextlib.suppress(ValueError):
        pid = int(status.partition("\nTgid:")[2].split("\n", 1)[0])  # the number of a thread will do
    view = process.read(pid)
    if view is None:
        raise UsageError(f"process {pid} has just ended")
    if view.state in "ZX":
        raise UsageError(f"process {pid} ({view.name}) is dead{_how(view)}; its parent {view.parent} has not noticed")
    if not view.command and (pid == 2 or view.parent == 2):
        raise UsageError(f"{pid} ({view.name}) is a thread of the kernel")
    _check_owner(view)
    return pid


def _how(view: ProcessView) -> str:
    if not view.exit_status:
        return ""
    how = f"signal {-view.exit_status}" if view.exit_status < 0 else f"exit status {view.exit_status}"
    return f" ({how})"


def _check_owner(view: ProcessView) -> None:
    """Of a process of another user we see that it exists, and nothing of what it does."""
    owner = _owner(view.pid)
    if owner is None or view.open_to_us or os.access(f"{PROC}/{view.pid}/fd", os.R_OK):
        return
    if owner == os.geteuid():
        raise UsageError(f"process {view.pid} ({view.name}) is closed to tracing: try {with_sudo(view.pid)}")
    name = _name(owner)
    raise UsageError(f"process {view.pid} ({view.name}) belongs to {name}: try {with_sudo(view.pid, name)}")


def with_sudo(pid: int, user: str = "root") -> str:
    """What to type; the environment of sudo has not our PATH."""
    whose = "" if user == "root" else f" -u {user}"
    return f"`sudo{whose} {sys.executable} -m torchmedic attach {pid}`, or {_CAPABILITY}"


def _owner(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((text(f"{PROC}/{pid}/status") or "").partition("\nUid:")[2].split()[1])
    return None


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return f"#{user}"


def hidden(view: ProcessView) -> str:
    """Why the calls of a process of our own cannot be seen, and how to permit it; empty if they can."""
    if view.open_to_us:
        return ""
    scope = (text(f"{PROC}/sys/kernel/yama/ptrace_scope") or "").strip()
    if scope in ("1", "2"):
        return (
            f"not seen: system calls and memory of the process (kernel.yama.ptrace_scope is {scope}): "
            f"`sudo sysctl kernel.yama.ptrace_scope=0`, or {with_sudo(view.pid)}"
        )
    if scope == "3":
        return "not seen: system calls and memory of the process (kernel.yama.ptrace_scope is 3, until the next start)"
    return f"not seen: system calls and memory of the process: try {with_sudo(view.pid)}"
