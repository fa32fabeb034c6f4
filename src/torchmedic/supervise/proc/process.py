"""Reads a process and all its threads from a handful of small files, in about 30 us per thread."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import syscalls

PROC = Path("/proc")

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_VARIABLE_PREFIXES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "PYTORCH_", "TORCH", "TOKENIZERS_", "NCCL_")
_VARIABLES = frozenset("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split())
_COMPILERS = ("libnvidia-ptxjitcompiler", "libnvrtc.", "libnvJitLink")


class Stat:
    """`/proc/PID/stat` of a process or a thread. Its second field, the name, may contain any character."""

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
        """The field with a number of proc(5); 0 if the kernel does not have it."""
        try:
            return int(self._fields[field - 3])
        except (IndexError, ValueError):
            return 0

    @property
    def cpu(self) -> float:
        return (self.number(14) + self.number(15)) / _TICKS_PER_SECOND


def stat_of(pid: int, *, proc: Path = PROC) -> Stat:
    return Stat(text(f"{proc}/{pid}/stat") or "")


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; one that has ended exists until its parent asks for its status."""
    stat = stat_of(pid)
    return bool(stat) and stat.state not in "ZX"


def status_words(path: str, name: str) -> list[str]:
    """The words of a field of `/proc/PID/status` or of a thread's `status`."""
    return (text(path) or "").partition(f"\n{name}:")[2].partition("\n")[0].split()


def read(pid: int, *, proc: Path = PROC) -> ProcessView | None:
    """The current state of a process; None if it does not exist."""
    base = f"{proc}/{pid}"
    stat = stat_of(pid, proc=proc)
    if not stat:
        return None
    taken = time.monotonic()
    found = (_thread(f"{base}/task/{tid}", tid) for tid in thread_ids(pid, proc=proc))
    threads = tuple(thread for thread in found if thread is not None)
    return ProcessView(
        pid=pid,
        name=stat.name,
        parent=stat.number(4),
        command=command_line(pid, proc=proc),
        state=stat.state,
        exit_status=_exit_status(stat.number(52)) if stat.state in "ZX" else None,
        started=_epoch(stat.number(22)),
        threads=threads,
        open_to_us=text(f"{base}/syscall") is not None,
        environment=_environment(base),
        rss=stat.number(24) * _PAGE_BYTES,
        swap=_status_number(base, "VmSwap", 10) * 1024,
        cpu=max(sum(thread.cpu for thread in threads), stat.cpu),
        caught_signals=_status_number(base, "SigCgt", 16),
        taken=taken,
        io=_io(base),
    )


def command_line(pid: int, *, proc: Path = PROC) -> tuple[str, ...]:
    words = (text(f"{proc}/{pid}/cmdline") or "").rstrip("\0")
    return tuple(words.split("\0")) if words else ()


def started(pid: int, *, proc: Path = PROC) -> float | None:
    """The start of a process in seconds since 1970."""
    stat = stat_of(pid, proc=proc)
    return _epoch(stat.number(22)) if stat else None


def thread_ids(pid: int, *, proc: Path = PROC) -> tuple[int, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(int(entry) for entry in os.listdir(f"{proc}/{pid}/task") if entry.isdigit()))
    return ()


def compilers(pid: int, *, proc: Path = PROC) -> tuple[str, ...]:
    """The compilers of the CUDA driver that a process has loaded."""
    maps = text(f"{proc}/{pid}/maps") or ""
    return tuple(name.rstrip(".") for name in _COMPILERS if f"/{name}" in maps)


def peek(pid: int, address: int, length: int, *, proc: Path = PROC) -> bytes:
    """Bytes of a process's memory, read without stopping it; fewer, or none, if not mapped or not permitted."""
    if address <= 0 or address >= 1 << 63:
        return b""
    try:
        descriptor = os.open(f"{proc}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, length, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(descriptor)


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
    """Variables that a process was started with; it may have changed them since."""
    entries = (entry.partition("=") for entry in (text(f"{base}/environ") or "").split("\0"))
    return {name: value for name, _, value in entries if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLES}


def _status_number(base: str, name: str, radix: int) -> int:
    with contextlib.suppress(ValueError, IndexError):
        return int(status_words(f"{base}/status", name)[0], radix)
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
    return time.time() - since_boot + ticks / _TICKS_PER_SECOND
