"""What the threads of a process wait for: mutexes, open files, file locks. Slower than reading the process alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.records.process import FileWait, LockHeld, ProcessView, ThreadView
from torchmedic.supervise.proc import file_locks, hidden_calls, last_run, open_files, polls, sleeps, sockets
from torchmedic.supervise.proc.futexes import futex_waits
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


def with_waits(views: Iterable[ProcessView], *, proc: Path = PROC) -> tuple[ProcessView, ...]:
    """Add to each process what its threads wait for."""
    filled = []
    for each in last_run.with_sleep(map(_with_calls, views), proc=proc):
        view = sleeps.with_sleeps(each, proc=proc)
        files = [wait for thread in view.threads for wait in _waits(view, thread, proc)]
        filled.append(
            msgspec.structs.replace(
                view,
                futexes=futex_waits(view, proc=proc),
                files=tuple(files),
                locks=_locks(view, files, proc),
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
    if thread.syscall in polls.CALLS:
        timed = polls.is_timed(thread)
        return [
            _wait(pid, thread, "poll", descriptor, proc, wants=wants, timed=timed)
            for descriptor, wants in polls.polled(pid, thread, proc=proc)
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
    wants: polls.Wants = "",
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
    pid: int,
    wait: FileWait,
    ends: dict[str, sockets.Socket],
    held: dict[str, list[open_files.OpenFile]],
    proc: Path,
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
