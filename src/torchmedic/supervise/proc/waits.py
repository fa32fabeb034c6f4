"""What the threads of a process wait for, and whom: mutexes, open files (one, or several by `poll`), file locks.

Slower than reading the process alone.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.records.process import FileWait, LockHeld, ProcessView, ThreadView
from torchmedic.supervise.proc import file_locks, hidden_calls, last_run, open_files, process, sleeps, sockets
from torchmedic.supervise.proc.futexes import futex_waits
from torchmedic.supervise.proc.open_files import info
from torchmedic.supervise.proc.process import PROC, peek

_Action = Literal["read", "write", "lock", "poll", "connect", "accept", "open"]

_ACTIONS: dict[str, _Action] = {
    **dict.fromkeys("read pread64 readv recvfrom recvmsg recvmmsg".split(), "read"),
    **dict.fromkeys("write pwrite64 writev sendto sendmsg sendfile".split(), "write"),
    **dict.fromkeys("fsync fdatasync fallocate ftruncate sync_file_range syncfs".split(), "write"),
    **dict.fromkeys("accept accept4".split(), "accept"),
    "connect": "connect",
    "flock": "lock",
}
_SETLKW, _OFD_SETLKW = 7, 38
_Wants = Literal["read", "write", ""]

_IN, _OUT = 1, 4
_MAX_DESCRIPTORS = 64
_EPOLL_ENTRY = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)", re.MULTILINE)

_POLLS = frozenset("poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2".split())
_MAX_OUTSIDERS = 8
_MAX_ANCESTORS = 64


def with_waits(views: Iterable[ProcessView], *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """Add to each process what its threads wait for."""
    filled = []
    for each in last_run.with_sleep(map(_with_calls, views), proc=proc):
        view = sleeps.with_sleeps(each, proc=proc)
        files = [wait for thread in view.threads for wait in _waits(view, thread, proc)]
        filled.append(
            msgspec.structs.replace(
                view, futexes=futex_waits(view, proc=proc), files=tuple(files), locks=_locks(view, files, proc)
            )
        )
    return _with_peers(filled, proc)


def _with_calls(view: ProcessView) -> ProcessView:
    if view.open_to_us:
        return view
    threads = (
        msgspec.structs.replace(thread, syscall=thread.syscall or hidden_calls.call_of(thread))
        for thread in view.threads
    )
    return msgspec.structs.replace(view, threads=tuple(threads))


def _waits(view: ProcessView, thread: ThreadView, proc: Path) -> list[FileWait]:
    pid = view.pid
    if thread.state in "RTtZX":
        return []
    if not thread.arguments:
        return [] if view.open_to_us else hidden_calls.waits_of(view, thread, proc=proc)
    if thread.syscall in _POLLS:
        timed = _is_timed(thread)
        return [
            _wait(pid, thread, "poll", descriptor, proc, wants=wants, timed=timed)
            for descriptor, wants in _polled(pid, thread, proc=proc)
        ]
    if thread.syscall == "openat":
        return [FileWait(tid=thread.tid, action="open", descriptor=-1, target=_path(pid, thread.arguments[1], proc))]
    if thread.syscall == "fcntl" and thread.arguments[1] in (_SETLKW, _OFD_SETLKW):
        return [_wait(pid, thread, "lock", thread.arguments[0], proc)]
    action = _ACTIONS.get(thread.syscall)
    return [_wait(pid, thread, action, thread.arguments[0], proc)] if action is not None else []


def _wait(
    pid: int,
    thread: ThreadView,
    action: _Action,
    descriptor: int,
    proc: Path,
    *,
    wants: _Wants = "",
    timed: bool = False,
) -> FileWait:
    descriptor &= 0xFFFFFFFF
    return FileWait(
        tid=thread.tid,
        action=action,
        descriptor=descriptor,
        target=open_files.target(pid, descriptor, proc=proc),
        wants=wants,
        timed=timed,
    )


def _path(pid: int, address: int, proc: Path) -> str:
    """A path argument of a system call. It may lie at the end of a mapping, so it is read in small pieces."""
    found = b""
    while len(found) < 4096 and b"\0" not in found:
        piece = peek(pid, address + len(found), 64, proc=proc)
        if not piece:
            break
        found += piece
    return found.partition(b"\0")[0].decode("utf-8", "replace")


def _locks(view: ProcessView, files: list[FileWait], proc: Path) -> tuple[LockHeld, ...]:
    found: list[LockHeld] = []
    for wait in files:
        if wait.action == "lock":
            found += file_locks.locks_awaited(view.pid, wait, proc=proc)
    return tuple(found)


def _with_peers(views: list[ProcessView], proc: Path) -> tuple[ProcessView, ...]:
    """Add the processes at the other ends of pipes and sockets, with one walk over the host for all of them."""
    ends: dict[str, sockets.Socket] = {}
    wanted: set[str] = set()
    for view in views:
        for wait in view.files:
            if wait.target.startswith("socket:") and wait.target not in ends:
                with contextlib.suppress(ValueError):
                    end = sockets.describe(view.pid, wait.target, proc=proc)
                    if end is not None:
                        ends[wait.target] = end
                        wanted.add(end.peer)
            elif wait.target.startswith("pipe:") or open_files.is_named_pipe(view.pid, wait.descriptor, proc=proc):
                wanted.add(wait.target)
    held = open_files.holders(wanted - {""}, proc=proc)
    return tuple(
        msgspec.structs.replace(view, files=tuple(_with_peer(view.pid, wait, ends, held, proc) for wait in view.files))
        if view.files
        else view
        for view in views
    )


def _with_peer(
    pid: int, wait: FileWait, ends: dict[str, sockets.Socket], held: dict[str, list[open_files.OpenFile]], proc: Path
) -> FileWait:
    end = ends.get(wait.target)
    if end is not None:
        peers = dict.fromkeys(file.pid for file in held.get(end.peer, ()))
        shown = f"{end.kind} {end.local} -> {end.remote}" if end.remote else f"{end.kind} {end.local}".strip()
        return msgspec.structs.replace(
            wait,
            target=wait.target if end.kind == "unix" else shown,
            peers=tuple(peers),
            remote=end.remote,
            connection=end.state,
        )
    if wait.target not in held:
        return wait
    reads = wait.action == "read" or wait.wants == "read" or open_files.mode(pid, wait.descriptor, proc=proc) == "r"
    other = "w" if reads else "r"
    peers = dict.fromkeys(
        file.pid for file in held[wait.target] if other in open_files.mode(file.pid, file.descriptor, proc=proc)
    )
    return msgspec.structs.replace(wait, peers=tuple(peers))


def _polled(pid: int, thread: ThreadView, *, proc: Path = PROC) -> list[tuple[int, _Wants]]:
    """The descriptors that a thread waits for, and what it wants to do with each."""
    arguments = (*thread.arguments, 0, 0, 0, 0)
    if thread.syscall in ("poll", "ppoll"):
        raw = peek(pid, arguments[0], 8 * min(arguments[1], _MAX_DESCRIPTORS), proc=proc)
        entries = struct.iter_unpack("<iHH", raw[: len(raw) // 8 * 8])
        return [(descriptor, _wants(events)) for descriptor, events, _ in entries if descriptor >= 0]
    if thread.syscall in ("select", "pselect6"):
        count = min(arguments[0], 1024)
        readable = _set(pid, arguments[1], count, proc)
        return [(each, "read") for each in readable] + [
            (each, "write") for each in _set(pid, arguments[2], count, proc) if each not in readable
        ]
    entries_of = _EPOLL_ENTRY.findall(info(pid, arguments[0], proc=proc))
    return [(int(descriptor), _wants(int(events, 16))) for descriptor, events in entries_of[:_MAX_DESCRIPTORS]]


def _is_timed(thread: ThreadView) -> bool:
    """Whether the wait has a time limit."""
    arguments = (*thread.arguments, 0, 0, 0, 0, 0)
    if thread.syscall == "poll":
        return arguments[2] & 0xFFFFFFFF < 1 << 31
    if thread.syscall in ("epoll_wait", "epoll_pwait"):
        return arguments[3] & 0xFFFFFFFF < 1 << 31
    if thread.syscall in ("select", "pselect6"):
        return arguments[4] != 0
    return arguments[3 if thread.syscall == "epoll_pwait2" else 2] != 0


def _wants(events: int) -> _Wants:
    return "read" if events & _IN else "write" if events & _OUT else ""


def _set(pid: int, address: int, count: int, proc: Path) -> list[int]:
    raw = peek(pid, address, (count + 7) // 8, proc=proc)
    return [number for number in range(min(count, 8 * len(raw))) if raw[number // 8] >> (number % 8) & 1]


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
    return with_waits([view for view in found if view is not None], proc=proc)


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
