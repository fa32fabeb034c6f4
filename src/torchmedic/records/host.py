"""CPU, memory and I/O that the host and the cgroups leave a run. Nothing here imports torch."""

from __future__ import annotations

import msgspec


class Psi(msgspec.Struct, frozen=True, kw_only=True):
    """Pressure stall information (PSI) of one resource.

    `full` is the percentage of the last ten seconds in which all tasks waited for the resource. The totals are
    microseconds since the start in which some, or all, tasks waited for it.
    """

    full: float | None = None
    some_total: int | None = None
    full_total: int | None = None


class HostPressure(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the host and of a process's cgroups at one moment. None where a value cannot be read.

    `group_*` is the pressure inside the process's own cgroup. Quotas and limits are the tightest of that cgroup and its
    ancestors; the counters beside them belong to the same cgroup. `cpu_quota` is in CPUs, `cpus` is the number of CPUs
    that the process may run on. `major_faults` is by process, for the processes that were asked for.
    """

    time: float
    cpu: Psi | None = None
    memory: Psi | None = None
    io: Psi | None = None
    group_cpu: Psi | None = None
    group_memory: Psi | None = None
    cpus: int | None = None
    cpu_quota: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    memory_current: int | None = None
    memory_limit: int | None = None
    memory_high: int | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    swap_in: int | None = None
    major_faults: dict[int, int] = msgspec.field(default_factory=dict)
    shm_size: int | None = None
    shm_free: int | None = None
    pids_limit: int | None = None
    pids_current: int | None = None


class PressureRates(msgspec.Struct, frozen=True, kw_only=True):
    """The changes between two readings of `HostPressure`. None where either could not be read.

    `*_some` and `*_full` (PSI) are shares of the time between the readings, `throttled_periods` is a share of the CPU
    periods that ended; all from 0 to 1. `swap_in` is in bytes per second, `major_faults` per second.
    """

    seconds: float
    cpu_some: float | None = None
    memory_full: float | None = None
    io_full: float | None = None
    group_cpu_some: float | None = None
    group_memory_full: float | None = None
    throttled_periods: float | None = None
    swap_in: float | None = None
    major_faults: float | None = None
