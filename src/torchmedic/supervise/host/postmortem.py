"""Facts about a dead process that only its surroundings hold: cgroup counters, the kernel log, limits of the host."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from torchmedic.records.memory import MemoryLimits
from torchmedic.supervise.host import cgroups


class MemoryGroup(NamedTuple):
    """The memory cgroup of a process, and the one with the lowest limit of that cgroup and its ancestors."""

    own: str
    bounding: str
    limit: int | None
    high: int | None
    is_v2: bool

    def oom_kills(self) -> int | None:
        file = "memory.events" if self.is_v2 else "memory.oom_control"
        return cgroups.table(f"{self.own}/{file}", "oom_kill").get("oom_kill")

    def hits(self) -> int | None:
        """How often the limit was reached."""
        if self.is_v2:
            return cgroups.table(f"{self.bounding}/memory.events", "oom").get("oom")
        return cgroups.number(f"{self.bounding}/memory.failcnt")

    def peak(self) -> int | None:
        return cgroups.number(f"{self.bounding}/{'memory.peak' if self.is_v2 else 'memory.max_usage_in_bytes'}")


def memory_group(listing: Path = Path("/proc/self/cgroup"), root: Path | None = None) -> MemoryGroup | None:
    """The memory cgroup of a process; None where there is none that counts kills."""
    marks = ("memory.events", "memory.oom_control")
    groups = [
        folder
        for folder in cgroups.folders("memory", listing, root or cgroups.default_root())
        if any(os.path.exists(f"{folder}/{mark}") for mark in marks)
    ]
    if not groups:
        return None
    limits = [(limit, folder) for folder in groups if (limit := cgroups.memory_limit(folder)) is not None]
    limit, bounding = min(limits, default=(None, groups[0]), key=lambda found: found[0] or 0)
    is_v2 = os.path.exists(f"{groups[0]}/memory.events")
    highs = [high for folder in groups if is_v2 and (high := cgroups.number(f"{folder}/memory.high")) is not None]
    return MemoryGroup(groups[0], bounding, limit, min(highs, default=None), is_v2)


def memory_limits(listing: Path = Path("/proc/self/cgroup"), root: Path | None = None) -> MemoryLimits:
    """Kills in the memory cgroup of a process, and the lowest limit of that cgroup and its ancestors."""
    group = memory_group(listing, root)
    if group is None:
        return MemoryLimits()
    return MemoryLimits(
        oom_kills=group.oom_kills(), limit=group.limit, high=group.high, peak=group.peak(), hits=group.hits()
    )


def host_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Out-of-memory kills of the kernel on this host since it was started."""
    return cgroups.table(vmstat, "oom_kill").get("oom_kill")


def kernel_log(pid: int, since: float) -> tuple[str, ...]:
    """Lines of the kernel log that name a process; empty where the log may not be read.

    Args:
        pid: The process.
        since: Seconds after the start of the host; older lines are about another process with the same pid.
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
    """The largest RSS of any child that has ended, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def host_memory() -> tuple[int, int]:
    """Bytes of RAM, and bytes of free swap."""
    import psutil

    return int(psutil.virtual_memory().total), int(psutil.swap_memory().free)


def core_pattern() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/core_pattern").read_text().strip()
    return ""
