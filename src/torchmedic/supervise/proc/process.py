"""One look at a process and all its threads: a handful of small files, about 30 us a thread."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import syscalls

PROC = Path("/proc")

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "PYTORCH_", "TORCH", "TOKENIZERS_", "NCCL_")
_TELLING = frozenset("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split())


class Stat:
    """`/proc/PID/stat`, of a process or of a thread. Its second field is a name in which anything may stand."""

    def __init__(self, line: str) -> None:
        head, _, tail = line.rpartition(")")
        self.name = head.partition("(")[2]
        self._fields = tail.split()

    def __bool__(self) -> bool:
        return len(self._fields) > 40

    @property
    def state(self) -> str:
        return self._fields[0]

    def number(self, field: int) -> int:
        """A field by its number in proc(5); 0 where this kernel has none."""
        try:
            return int(self._fields[field - 3])
        except (IndexError, ValueError):
            return 0

    @property
    def cpu(self) -> float:
        return (self.number(14) + self.number(15)) / _TICKS


def read(pid: int, *, proc: Path = PROC) -> ProcessView | None:
    """How a process looks now; None if there is none, or no longer."""
    base = f"{proc}/{pid}"
    stat = Stat(text(f"{base}/stat") or "")
    if not stat:
        return None
    taken = time.monotonic()
    threads = _threads(base)
    status = text(f"{base}/status") or ""
    return ProcessView(
        pid=pid,
        name=stat.name,
        parent=stat.number(4),
        group=stat.number(5),
        session=stat.number(6),
        command=command_line(pid, proc=proc),
        state=stat.state,
        exit_status=_exit_status(stat.number(52)) if stat.state in "ZX" else None,
        started=_epoch(stat.number(22)),
        threads=threads,
        open_to_us=text(f"{base}/syscall") is not None,
        environment=_environment(base),
        rss=stat.number(24) * _PAGE,
        swap=_status_number(status, "VmSwap", 10) * 1024,
        cpu=max(sum(thread.cpu for thread in threads), stat.cpu),
        caught_signals=_status_number(status, "SigCgt", 16),
        taken=taken,
        faults=stat.number(12),
        io=_io(base),
    )


def command_line(pid: int, *, proc: Path = PROC) -> tuple[str, ...]:
    words = (text(f"{proc}/{pid}/cmdline") or "").rstrip("\0")
    return tuple(words.split("\0")) if words else ()


def started(pid: int, *, proc: Path = PROC) -> float | None:
    """When a process began, in seconds since 1970."""
    stat = Stat(text(f"{proc}/{pid}/stat") or "")
    return _epoch(stat.number(22)) if stat else None


def thread_ids(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(int(entry) for entry in os.listdir(f"{proc}/{pid}/task") if entry.isdigit()))
    return ()


def _threads(base: str) -> tuple[ThreadView, ...]:
    with contextlib.suppress(OSError):
        tids = sorted(int(entry) for entry in os.listdir(f"{base}/task") if entry.isdigit())
        found = (_thread(f"{base}/task/{tid}", tid) for tid in tids)
        return tuple(thread for thread in found if thread is not None)
    return ()


def _thread(base: str, tid: int) -> ThreadView | None:
    stat = Stat(text(f"{base}/stat") or "")
    if not stat:
        return None
    cpu, waited, switches = stat.cpu, 0.0, 0
    with contextlib.suppress(ValueError):  # nanoseconds, where the ticks of `stat` are 10 ms
        used, queued, times = map(int, (text(f"{base}/schedstat") or "").split())
        cpu, waited, switches = used / 1e9, queued / 1e9, times
    call, arguments, pointer = syscalls.parse(text(f"{base}/syscall") or "")
    wchan = (text(f"{base}/wchan") or "").strip()
    return ThreadView(
        tid=tid,
        name=stat.name,
        state=stat.state,
        cpu=cpu,
        waited=waited,
        switches=switches,
        wchan="" if wchan == "0" else wchan,
        syscall=call,
        arguments=arguments,
        stack_pointer=pointer,
    )


def _environment(base: str) -> dict[str, str]:
    """What it was started with; a process may have changed its own variables since."""
    entries = (entry.partition("=") for entry in (text(f"{base}/environ") or "").split("\0"))
    return {name: value for name, _, value in entries if name.startswith(_VARIABLES) or name in _TELLING}


def _status_number(status: str, name: str, base: int) -> int:
    rest = status.partition(f"\n{name}:")[2].split(maxsplit=1)
    with contextlib.suppress(ValueError, IndexError):
        return int(rest[0], base)
    return 0


def _io(base: str) -> tuple[int, ...]:
    table = dict(line.split(": ") for line in (text(f"{base}/io") or "").splitlines() if ": " in line)
    try:
        return tuple(int(table[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    except (KeyError, ValueError):
        return ()


def _exit_status(status: int) -> int:
    """A wait status as `Popen.returncode` has it."""
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _epoch(ticks: int) -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    since_boot = time.clock_gettime(clock) if clock is not None else time.monotonic()
    return time.time() - since_boot + ticks / _TICKS
