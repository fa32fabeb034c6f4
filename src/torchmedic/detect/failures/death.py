"""A wait status and what the dead left behind -> the incident to explain, or none."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from torchmedic.records import StackFrame, ThreadStack
from torchmedic.runfolder import reading

# Ends that somebody asked for: the user, a scheduler, a closed terminal or pipe, a timer. Not incidents.
REQUESTED = frozenset(
    "SIGTERM SIGINT SIGHUP SIGQUIT SIGPIPE SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGXCPU SIGXFSZ SIGPWR".split()
)

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d{1,9}|\?\?\?) in (?P<function>.*)$')

# What faulthandler calls the signals that it catches.
_FATAL = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def signal_name(status: int) -> str | None:
    """The signal that a wait status stands for; a shell reports a signal of its child as 128 + N."""
    number = -status if status < 0 else status - 128 if status > 128 else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def fatal_signal(fatal_line: str) -> str | None:
    """The signal that faulthandler's first line names."""
    return next((name for text, name in _FATAL.items() if text.lower() in fatal_line.lower()), None)


def read_stacks(path: Path) -> tuple[str, tuple[ThreadStack, ...]]:
    """Faulthandler's dump: its first line (`Fatal Python error: ...`) and the threads, the current one first."""
    try:
        lines = reading.read(path, cut=True).decode(errors="replace").splitlines()
    except OSError:
        return "", ()
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    threads: list[tuple[bool, list[StackFrame]]] = []
    for line in lines:
        if "most recent call first" in line:
            threads.append((line.startswith("Current thread"), []))
        elif threads and (match := _FRAME.match(line)):
            number = match["line"]
            threads[-1][1].append(
                StackFrame(file=match["file"], line=int(number) if number.isdigit() else 0, function=match["function"])
            )
        elif line.startswith("Extension modules"):
            break
    threads.sort(key=lambda thread: not thread[0])
    return fatal, tuple(ThreadStack(current=current, frames=tuple(frames)) for current, frames in threads)


class NamedDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A process that an exception in another one says has died of a signal."""

    pid: int
    signal: str
    part: str


_WORKER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.\n]+)")
_RECEIVING = frozenset({"rebuild_storage_fd", "rebuild_storage_filename"})
_PINNING, _PINNING_ENDED = "_pin_memory_loop", "Pin memory thread exited unexpectedly"
_MAX_WAIT_SECONDS = 10.0  # on a busy machine a process takes long to end
_WORKERS = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")


def named_death(error: BaseException) -> NamedDeath | None:
    """The death of a worker or a spawned process that this exception only passes on."""
    pid, name = getattr(error, "error_pid", None), getattr(error, "signal_name", None)
    if isinstance(pid, int) and isinstance(name, str) and name in signal.Signals.__members__:
        return NamedDeath(pid=pid, signal=name, part="child")
    if isinstance(failures := getattr(error, "failures", None), dict):
        return _failed_rank(failures)
    chain: BaseException | None = error
    for _ in range(5):
        match = _WORKER.search(str(chain)) if isinstance(chain, RuntimeError) else None
        if match is not None:
            found = next((each for each in signal.Signals if signal.strsignal(each) == match[2].strip()), None)
            return None if found is None else NamedDeath(pid=int(match[1]), signal=found.name, part="worker")
        chain = chain.__cause__ if chain is not None else None
    if _WORKERS.search(str(error)) or isinstance(error, ConnectionError | EOFError):
        return _dead_of(lost_senders(error) or _workers_in(error))
    return _dead_of(lost_senders(error))


def lost_senders(error: BaseException) -> list[Any]:
    """The DataLoader workers that are gone, where a batch could not be received: its memory is had from the sender."""
    if isinstance(error, RuntimeError) and _PINNING_ENDED in str(error):
        return [worker for worker in _workers_in(error) if worker.exitcode]
    workers = _workers_in(error) if _receives(error) else []
    # The end of a process is seen in its connections before it can be waited for.
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    gone: list[Any] = []
    while workers and not gone and time.monotonic() < deadline:
        time.sleep(0.02)
        gone = [worker for worker in workers if worker.exitcode]
    return gone


def is_told_by_loader(error: BaseException) -> bool:
    """Whether the thread that pins batches has lost a sender: the loader notices by itself, and knows which one."""
    return _receives(error) and _PINNING in _functions(error)


def _receives(error: BaseException) -> bool:
    return isinstance(error, OSError | EOFError) and not _RECEIVING.isdisjoint(_functions(error))


def _functions(error: BaseException) -> set[str]:
    found, tb = set(), error.__traceback__
    while tb is not None:
        found.add(tb.tb_frame.f_code.co_name)
        tb = tb.tb_next
    return found


def _failed_rank(failures: dict[Any, Any]) -> NamedDeath | None:
    """The process that torchrun's launcher saw die first."""
    for failure in sorted(failures.values(), key=lambda each: getattr(each, "timestamp", 0)):
        pid, status = getattr(failure, "pid", None), getattr(failure, "exitcode", 0)
        name = signal_name(status) if isinstance(status, int) and status < 0 else None
        if isinstance(pid, int) and name is not None and name not in REQUESTED:
            return NamedDeath(pid=pid, signal=name, part="child")
    return None


def _workers_in(error: BaseException) -> list[Any]:
    """The loader saw that workers are gone, or only that nobody answers; its own frame still holds them."""
    tb = error.__traceback__
    while tb is not None:
        workers = getattr(tb.tb_frame.f_locals.get("self"), "_workers", None)
        if isinstance(workers, list) and workers and hasattr(workers[0], "exitcode"):
            return workers
        tb = tb.tb_next
    return []


def _dead_of(workers: list[Any]) -> NamedDeath | None:
    for _ in range(20 if workers else 0):  # its connections close a moment before a process is gone
        for worker in workers:
            status = worker.exitcode
            name = signal_name(status) if isinstance(status, int) and status < 0 else None
            if name is not None:
                return NamedDeath(pid=worker.pid, signal=name, part="worker")
        time.sleep(0.01)
    return None


def raised_elsewhere(error: BaseException) -> int | None:
    """The process whose exception this one only repeats: `torch.multiprocessing.spawn` raises it again as text."""
    pid = getattr(error, "error_pid", None)
    return pid if isinstance(pid, int) and type(error).__name__ == "ProcessRaisedException" else None
