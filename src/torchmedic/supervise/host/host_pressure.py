"""The CPU, memory, swap, shared memory and processes that the host leaves a run: files that need no root, under 1 ms.

A run that waits because one of them is used up is not hung, and nothing inside the run can tell the difference.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchmedic.records.host import HostPressure, PressureRates, Psi
from torchmedic.supervise.host import cgroups

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read(
    pid: int | None = None,
    pids: Iterable[int] = (),
    *,
    proc: Path = _PROC,
    groups: Path | None = None,
    shm: Path = _SHM,
) -> HostPressure:
    """The current state of the host.

    Args:
        pid: The process whose cgroups and CPUs are read, by default our own.
        pids: The processes whose major page faults are counted.
        proc: Replaces /proc.
        groups: Replaces /sys/fs/cgroup.
        shm: Replaces /dev/shm.
    """
    groups = groups or cgroups.default_root()
    own = f"{proc}/{'self' if pid is None else pid}"
    listing = f"{own}/cgroup"
    group = next(iter(cgroups.folders("", listing, groups)), None)
    swapped_in = cgroups.table(f"{proc}/vmstat", "pswpin").get("pswpin")
    meminfo = cgroups.table(f"{proc}/meminfo", "MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    shared = shared_memory(shm)
    return HostPressure(
        time=time.monotonic(),
        cpu=psi(f"{proc}/pressure/cpu"),
        memory=psi(f"{proc}/pressure/memory"),
        io=psi(f"{proc}/pressure/io"),
        group_cpu=psi(f"{group}/cpu.pressure") if group is not None else None,
        group_memory=psi(f"{group}/memory.pressure") if group is not None else None,
        cpus=allowed_cpus(f"{own}/status"),
        **_cpu(cgroups.folders("cpu", listing, groups)),
        **_memory(cgroups.folders("memory", listing, groups)),
        memory_total=_bytes(meminfo.get("MemTotal")),
        memory_available=_bytes(meminfo.get("MemAvailable")),
        swap_total=_bytes(meminfo.get("SwapTotal")),
        swap_free=_bytes(meminfo.get("SwapFree")),
        swap_in=None if swapped_in is None else swapped_in * _PAGE_BYTES,
        major_faults={pid: faults for pid in pids if (faults := major_faults(f"{proc}/{pid}/stat")) is not None},
        shm_size=shared[0] if shared is not None else None,
        shm_free=shared[1] if shared is not None else None,
        **_pids(cgroups.folders("pids", listing, groups)),
    )


def difference(before: HostPressure, after: HostPressure) -> PressureRates:
    """The changes between two readings, per second."""
    seconds = max(after.time - before.time, 1e-6)

    def stalled(first: Psi | None, second: Psi | None, kind: str) -> float | None:
        rise = None if not (first and second) else _rise(getattr(first, kind), getattr(second, kind))
        return None if rise is None else min(1.0, rise / 1e6 / seconds)

    swapped_in = _rise(before.swap_in, after.swap_in)
    periods = _rise(before.periods, after.periods)
    throttled = _rise(before.throttled_periods, after.throttled_periods)
    # A process that started or ended between the two readings has no rate.
    both = before.major_faults.keys() & after.major_faults.keys()
    faults = sum(after.major_faults[pid] - before.major_faults[pid] for pid in both)
    return PressureRates(
        seconds=seconds,
        cpu_some=stalled(before.cpu, after.cpu, "some_total"),
        memory_full=stalled(before.memory, after.memory, "full_total"),
        io_full=stalled(before.io, after.io, "full_total"),
        group_cpu_some=stalled(before.group_cpu, after.group_cpu, "some_total"),
        group_memory_full=stalled(before.group_memory, after.group_memory, "full_total"),
        throttled_periods=throttled / periods if periods and throttled is not None else None,
        swap_in=None if swapped_in is None else swapped_in / seconds,
        major_faults=faults / seconds if both else None,
    )


def psi(path: Path | str) -> Psi | None:
    """Read a file of pressure stall information; None where the kernel keeps none."""
    values: dict[str, Any] = {}
    for line in (cgroups.text(path) or "").splitlines():
        kind, _, rest = line.partition(" ")
        fields = dict(word.partition("=")[::2] for word in rest.split())
        with contextlib.suppress(KeyError, ValueError):
            values[kind], values[f"{kind}_total"] = float(fields["avg10"]), int(fields["total"])
    known = {name: value for name, value in values.items() if name in Psi.__struct_fields__}
    return Psi(**known) if known else None


def shared_memory(folder: Path | str = _SHM) -> tuple[int, int] | None:
    """Size and free bytes of /dev/shm; None if it cannot be read."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return None


def allowed_cpus(status: Path | str) -> int | None:
    """Number of CPUs that a process may run on, from its `/proc/PID/status`."""
    for line in (cgroups.text(status) or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            with contextlib.suppress(ValueError):
                return sum(_length(part) for part in line.partition(":")[2].strip().split(","))
    return None


def _length(cpus: str) -> int:
    first, _, last = cpus.partition("-")
    return int(last or first) - int(first) + 1


def major_faults(stat: Path | str) -> int | None:
    """Page faults of a process that had to read from a disk, from its `/proc/PID/stat`."""
    with contextlib.suppress(ValueError, IndexError):
        # The process name comes first and may contain brackets.
        return int((cgroups.text(stat) or "").rpartition(")")[2].split()[9])
    return None


def quota(group: Path | str) -> float | None:
    """Number of CPUs that a cgroup may use at the same time on average; None for no limit."""
    words = (cgroups.text(f"{group}/cpu.max") or "").split()
    if not words:
        words = [cgroups.text(f"{group}/{name}") or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    with contextlib.suppress(ValueError, IndexError, ZeroDivisionError):
        share = int(words[0]) / int(words[1])
        return share if share > 0 else None
    return None


def _cpu(groups: list[str]) -> dict[str, Any]:
    quotas = [(allowed, group) for group in groups if (allowed := quota(group)) is not None]
    tightest, group = min(quotas, default=(None, groups[0] if groups else None), key=lambda found: found[0] or 0.0)
    if group is None:
        return {}
    counters = cgroups.table(f"{group}/cpu.stat", "nr_periods", "nr_throttled")
    return {
        "cpu_quota": tightest,
        "periods": counters.get("nr_periods"),
        "throttled_periods": counters.get("nr_throttled"),
    }


def _memory(groups: list[str]) -> dict[str, Any]:
    found = []
    for group in groups:
        limit = cgroups.memory_limit(group)
        high = cgroups.number(f"{group}/memory.high")
        found.append((min((bound for bound in (limit, high) if bound is not None), default=None), limit, high, group))
    bounded = [entry for entry in found if entry[0] is not None] or found[:1]
    if not bounded:
        return {}
    _, limit, high, group = min(bounded, key=lambda entry: entry[0] or 0)
    current = cgroups.number(f"{group}/memory.current")
    return {
        "memory_current": cgroups.number(f"{group}/memory.usage_in_bytes") if current is None else current,
        "memory_limit": limit,
        "memory_high": high,
    }


def _pids(groups: list[str]) -> dict[str, int | None]:
    bounded = [(limit, group) for group in groups if (limit := cgroups.number(f"{group}/pids.max")) is not None]
    if not bounded:
        return {}
    limit, group = min(bounded, key=lambda found: found[0])
    return {"pids_limit": limit, "pids_current": cgroups.number(f"{group}/pids.current")}


def _bytes(kilobytes: int | None) -> int | None:
    return None if kilobytes is None else kilobytes * 1024


def _rise(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(after - before, 0)
