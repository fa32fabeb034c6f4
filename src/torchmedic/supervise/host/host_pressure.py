"""What the host leaves a run of CPU, memory, swap, shared memory and processes: files that need no root, under 1 ms.

A run that stands still for want of one of them is not hung, and nothing inside it can tell.
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
_PAGE = os.sysconf("SC_PAGE_SIZE")


def read(
    pid: int | None = None,
    pids: Iterable[int] = (),
    *,
    proc: Path = _PROC,
    groups: Path | None = None,
    shm: Path = _SHM,
) -> HostPressure:
    """How things stand now.

    Args:
        pid: The process whose groups and CPUs are meant, by default our own.
        pids: Those whose major faults are counted.
        proc: In place of /proc.
        groups: In place of /sys/fs/cgroup.
        shm: In place of /dev/shm.
    """
    groups = groups or cgroups.default_root()
    me = f"{proc}/{'self' if pid is None else pid}"
    listing = f"{me}/cgroup"
    own = next(iter(cgroups.folders("", listing, groups)), None)
    vmstat = cgroups.table(f"{proc}/vmstat", "pswpin", "pswpout", "pgmajfault")
    meminfo = cgroups.table(f"{proc}/meminfo", "MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    swapped_in, swapped_out = vmstat.get("pswpin"), vmstat.get("pswpout")
    return HostPressure(
        time=time.monotonic(),
        cpu=psi(f"{proc}/pressure/cpu"),
        memory=psi(f"{proc}/pressure/memory"),
        io=psi(f"{proc}/pressure/io"),
        group_cpu=psi(f"{own}/cpu.pressure") if own is not None else None,
        group_memory=psi(f"{own}/memory.pressure") if own is not None else None,
        group_io=psi(f"{own}/io.pressure") if own is not None else None,
        cpus=allowed_cpus(f"{me}/status"),
        **_cpu(cgroups.folders("cpu", listing, groups)),
        **_memory(cgroups.folders("memory", listing, groups)),
        memory_total=_bytes(meminfo.get("MemTotal")),
        memory_available=_bytes(meminfo.get("MemAvailable")),
        swap_total=_bytes(meminfo.get("SwapTotal")),
        swap_free=_bytes(meminfo.get("SwapFree")),
        swap_in=None if swapped_in is None else swapped_in * _PAGE,
        swap_out=None if swapped_out is None else swapped_out * _PAGE,
        host_major_faults=vmstat.get("pgmajfault"),
        major_faults={pid: faults for pid in pids if (faults := major_faults(f"{proc}/{pid}/stat")) is not None},
        **_shm(shm),
        **_pids(cgroups.folders("pids", listing, groups)),
    )


def difference(before: HostPressure, after: HostPressure) -> PressureRates:
    """What happened between two readings, per second of the time between them."""
    seconds = max(after.time - before.time, 1e-6)

    def per_second(name: str) -> float | None:
        rise = _rise(getattr(before, name), getattr(after, name))
        return None if rise is None else rise / seconds

    def waited(resource: str, kind: str) -> float | None:
        first, second = getattr(before, resource), getattr(after, resource)
        rise = None if not (first and second) else _rise(getattr(first, kind), getattr(second, kind))
        return None if rise is None else min(1.0, rise / 1e6 / seconds)

    periods = _rise(before.periods, after.periods)
    throttled = _rise(before.throttled_periods, after.throttled_periods)
    # A process that has come or gone between the two has no rate.
    both = before.major_faults.keys() & after.major_faults.keys()
    faults = sum(after.major_faults[pid] - before.major_faults[pid] for pid in both)
    return PressureRates(
        seconds=seconds,
        cpu_some=waited("cpu", "some_total"),
        memory_some=waited("memory", "some_total"),
        memory_full=waited("memory", "full_total"),
        io_some=waited("io", "some_total"),
        io_full=waited("io", "full_total"),
        group_cpu_some=waited("group_cpu", "some_total"),
        group_memory_some=waited("group_memory", "some_total"),
        group_memory_full=waited("group_memory", "full_total"),
        group_io_some=waited("group_io", "some_total"),
        group_io_full=waited("group_io", "full_total"),
        throttled_periods=throttled / periods if periods and throttled is not None else None,
        throttled_time=per_second("throttled_seconds"),
        memory_high_events=per_second("memory_high_events"),
        swap_in=per_second("swap_in"),
        swap_out=per_second("swap_out"),
        host_major_faults=per_second("host_major_faults"),
        major_faults=faults / seconds if both else None,
    )


def psi(path: Path | str) -> Psi | None:
    """A file of PSI; None where the kernel keeps none."""
    values: dict[str, Any] = {}
    for line in (cgroups.text(path) or "").splitlines():
        kind, _, rest = line.partition(" ")
        fields = dict(word.partition("=")[::2] for word in rest.split())
        with contextlib.suppress(KeyError, ValueError):
            values[kind], values[f"{kind}_total"] = float(fields["avg10"]), int(fields["total"])
    known = {name: value for name, value in values.items() if name in Psi.__struct_fields__}
    return Psi(**known) if known else None


def allowed_cpus(status: Path | str) -> int | None:
    """How many CPUs a process may run on, by its `/proc/PID/status`."""
    for line in (cgroups.text(status) or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            with contextlib.suppress(ValueError):
                return sum(_length(part) for part in line.partition(":")[2].strip().split(","))
    return None


def _length(cpus: str) -> int:
    first, _, last = cpus.partition("-")
    return int(last or first) - int(first) + 1


def major_faults(stat: Path | str) -> int | None:
    """Page faults of a process that had to wait for a disk. Its name may hold anything, brackets too."""
    with contextlib.suppress(ValueError, IndexError):
        return int((cgroups.text(stat) or "").rpartition(")")[2].split()[9])
    return None


def quota(group: Path | str) -> float | None:
    """How many CPUs a group may use at the same time on average; None for no limit."""
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
    counters = cgroups.table(f"{group}/cpu.stat", "nr_periods", "nr_throttled", "throttled_usec", "throttled_time")
    units = (("throttled_usec", 1e6), ("throttled_time", 1e9))  # version 2, version 1
    seconds = [counters[name] / unit for name, unit in units if name in counters]
    return {
        "cpu_quota": tightest,
        "periods": counters.get("nr_periods"),
        "throttled_periods": counters.get("nr_throttled"),
        "throttled_seconds": next(iter(seconds), None),
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
        "memory_high_events": cgroups.table(f"{group}/memory.events", "high").get("high"),
    }


def _shm(folder: Path) -> dict[str, int]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return {}
    return {"shm_size": found.f_blocks * found.f_frsize, "shm_free": found.f_bavail * found.f_frsize}


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
