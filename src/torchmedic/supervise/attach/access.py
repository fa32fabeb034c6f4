"""Finds the process for a number and checks that it may be read. Every error is one line."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys

from torchmedic.errors import UsageError
from torchmedic.records.process import ProcessView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC, status_words

_CAPABILITY = "in a container: `docker run --cap-add SYS_PTRACE`"


def resolve(pid: int) -> int:
    """The process of a pid; the number of a thread stands for its process.

    Raises:
        UsageError: There is no such process, or it may not be read.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("attach needs the /proc of Linux; elsewhere try `py-spy dump --pid PID`")
    group = status_words(f"{PROC}/{pid}/status", "Tgid")
    if not group:
        raise UsageError(f"there is no process {pid} here (in a container, only its own processes can be seen)")
    pid = int(group[0])
    view = process.read(pid)
    if view is None:
        raise UsageError(f"process {pid} has just ended")
    if view.state in "ZX":
        raise UsageError(
            f"process {pid} ({view.name}) is dead{_how(view)}; its parent {view.parent} has not waited for it"
        )
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
    """Refuse a process that may not be read, because it belongs to another user or is closed to tracing."""
    owner = _owner(view.pid)
    if owner is None or view.open_to_us or os.access(f"{PROC}/{view.pid}/fd", os.R_OK):
        return
    if owner == os.geteuid():
        raise UsageError(f"process {view.pid} ({view.name}) is closed to tracing: try {with_sudo(view.pid)}")
    name = _name(owner)
    raise UsageError(f"process {view.pid} ({view.name}) belongs to {name}: try {with_sudo(view.pid, name)}")


def with_sudo(pid: int, user: str = "root") -> str:
    """The command to type. It has a full path, because sudo does not keep PATH."""
    whose = "" if user == "root" else f" -u {user}"
    return f"`sudo{whose} {sys.executable} -m torchmedic attach {pid}`, or {_CAPABILITY}"


def _owner(pid: int) -> int | None:
    words = status_words(f"{PROC}/{pid}/status", "Uid")
    return int(words[1]) if len(words) > 1 else None


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return f"#{user}"


def hidden(view: ProcessView) -> str:
    """Why the system calls of the user's own process cannot be read, and how to permit it; empty if they can."""
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
