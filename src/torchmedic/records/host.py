"""What the host and the control groups leave a run: of CPU, memory, I/O. Nothing here imports torch."""

from __future__ import annotations

import msgspec


class Psi(msgspec.Struct, frozen=True, kw_only=True):
    """PSI of one resource: the share of the last ten seconds, in percent, that some or all tasks waited for it.

    The totals are microseconds since the start, from which a share over any time can be told.
    """

    some: float | None = None
    full: float | None = None
    some_total: int | None = None
    full_total: int | None = None


class HostPressure(msgspec.Struct, frozen=True, kw_only=True):
    """What the host and the control groups of a process leave it, at one moment. None where that cannot be read.

    `group_*` is the pressure inside the process's own group. A quota and a limit are the tightest of the group and of
    those around it, and the counters beside them belong to that same group. `cpu_quota` is in CPUs, `cpus` how many of
    them the process may run on. `major_faults` are of the processes that were asked for.
    """

    time: float
    cpu: Psi | None = None
    memory: Psi | None = None
    io: Psi | None = None
    group_cpu: Psi | None = None
    group_memory: Psi | None = None
    group_io: Psi | None = None
    cpus: int | None = None
    cpu_quota: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_seconds: float | None = None
    memory_current: int | None = None
    memory_limit: int | None = None
    memory_high: int | None = None
    memory_high_events: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    swap_in: int | None = None
    swap_out: int | None = None
    host_major_faults: int | None = None
    major_faults: dict[int, int] = msgspec.field(default_factory=dict)
    shm_size: int | None = None
    shm_free: int | None = None
    pids_limit: int | None = None
    pids_current: int | None = None


class PressureRates(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two readings of `HostPressure`. None where either could not be read.

    PSI, `throttled_periods` (of those that ended) and `throttled_time` are shares from 0 to 1 of the time between;
    several throttled CPUs can make `throttled_time` more than 1. The others are per second, swap in bytes.
    """

    seconds: float
    cpu_some: float | None = None
    memory_some: float | None = None
    memory_full: float | None = None
    io_some: float | None = None
    io_full: float | None = None
    group_cpu_some: float | None = None
    group_memory_some: float | None = None
    group_memory_full: float | None = None
    group_io_some: float | None = None
    group_io_full: float | None = None
    throttled_periods: float | None = None
    throttled_time: float | None = None
    memory_high_events: float | None = None
    swap_in: float | None = None
    swap_out: float | None = None
    host_major_faults: float | None = None
    major_faults: float | None = None
