"""What only an outsider can see of a process that is gone: cgroup counters, the kernel's log, limits of the host."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from torchmedic.records import MemoryLimits
from torchmedic.settings import CGROUP_VARIABLE

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


def memory_limits(listing: Path = Path("/proc/self/cgroup"), root: Path | None = None) -> MemoryLimits:
    """The memory cgroup of a process: its count of OOM kills, its limit and its peak. Version 2, then version 1."""
    folder = _memory_cgroup(listing, root or Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup")))
    if folder is None:
        return MemoryLimits()
    if (folder / "memory.events").exists():
        return MemoryLimits(
            oom_kills=_count(folder / "memory.events", "oom_kill"),
            limit=_number(folder / "memory.max"),
            peak=_number(folder / "memory.peak"),
        )
    return MemoryLimits(
        oom_kills=_count(folder / "memory.oom_control", "oom_kill"),
        limit=_number(folder / "memory.limit_in_bytes"),
        peak=_number(folder / "memory.max_usage_in_bytes"),
    )


def _memory_cgroup(listing: Path, root: Path) -> Path | None:
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root if not controllers else None
        if base is None:
            continue
        # In a container the path of the host may not exist; the group is then mounted at the root.
        for folder in (base / path.lstrip("/"), base):
            if (folder / "memory.events").exists() or (folder / "memory.oom_control").exists():
                return folder
    return None


def _count(path: Path, key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        value = int(path.read_text())
        return value if value < _NO_LIMIT else None
    return None


def host_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How often the kernel has killed for memory on this host since it was started."""
    return _count(vmstat, "oom_kill")


def kernel_log(pid: int, since: float) -> tuple[str, ...]:
    """Lines of the kernel's log that name this process, where a user may read it.

    Args:
        pid: The process.
        since: Seconds after the start of the host; what is older is about another process with the same number.
    """
    if shutil.which("dmesg") is None:
        return ()
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=2, errors="replace", check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return lines_about(done.stdout, pid, since)


def lines_about(log: str, pid: int, since: float) -> tuple[str, ...]:
    wanted = re.compile(rf"(\bpid[ =]|\bprocess |\[){pid}\b")
    found = []
    for line in log.splitlines():
        stamp = re.match(r"\[ *(\d+\.\d+)\]", line)
        if wanted.search(line) and stamp is not None and float(stamp[1]) >= since:
            found.append(line.strip())
    return tuple(found[-5:])


def peak_rss_of_children() -> int:
    """The largest RSS that any ended child had, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def host_memory() -> tuple[int, int]:
    """Bytes of RAM in the host, and of free swap."""
    import psutil

    return int(psutil.virtual_memory().total), int(psutil.swap_memory().free)


def shm_free() -> int | None:
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        return status.f_bavail * status.f_frsize
    return None


def core_pattern() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return ""
