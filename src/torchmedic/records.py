"""Every record that crosses a stage or touches disk.

`Report` is `report.json`, the contract that others build on: fields are added, never renamed or removed.
Nothing here imports torch, so that the supervising parent can read and write all of it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = 1

Severity = Literal["error", "warning", "note"]
Grade = Literal["proven", "likely", "possible"]
Role = Literal["cause", "origin", "surfaced", "writer", "saver", "holder"]
Safety = Literal["safe", "changes-training", "edit"]
Phase = Literal["other", "data", "forward", "backward", "optimizer"]

PHASES: tuple[Phase, ...] = ("other", "data", "forward", "backward", "optimizer")


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """One labelled place in the source.

    Columns count characters of the file's line from 1; `end_column` is exclusive. `code` is that line without its
    indentation, which is `indent` characters.
    """

    role: Role
    file: str
    line: int
    column: int = 1
    end_column: int = 1
    code: str = ""
    indent: int = 0
    label: str = ""


class Treatment(msgspec.Struct, frozen=True, kw_only=True):
    """Advice. It is `proven` only if a trial replay of the failing step passed with it; else `result` is a prediction.

    `patch` is a unified diff without context lines, as `patch -p0` takes it.
    """

    title: str
    safety: Safety = "edit"
    proven: bool = False
    result: str = ""
    patch: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One named cause. The first location with role `cause` is the line to change or to look at."""

    code: str
    name: str
    severity: Severity = "error"
    grade: Grade
    message: str
    cause: str
    step: int | None = None
    rank: int = 0
    locations: tuple[Location, ...] = ()
    evidence: tuple[str, ...] = ()
    treatments: tuple[Treatment, ...] = ()

    @property
    def cause_location(self) -> Location | None:
        return next((place for place in self.locations if place.role == "cause"), None)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the run ended. `symptom` is null when nothing was wrong."""

    exit_status: int | None = None
    signal: str | None = None
    steps: int = 0
    symptom: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    outcome: Outcome = Outcome()
    diagnoses: tuple[Diagnosis, ...] = ()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A bug of ours that was contained."""

    where: str
    error: str
    traceback: str = ""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the black box: where training was at an instant."""

    time: float
    step: int
    micro_step: int
    updates: int
    phase: Phase
    file: str
    line: int
    rss: int
    device_memory: int


class BoxContents(msgspec.Struct, frozen=True, kw_only=True):
    """A black box as read back, oldest moment first."""

    pid: int
    started: float
    clean_exit: bool
    moments: tuple[Moment, ...]

    @property
    def last(self) -> Moment | None:
        return self.moments[-1] if self.moments else None


class StackFrame(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """A thread as faulthandler dumped it, innermost frame first."""

    current: bool
    frames: tuple[StackFrame, ...]


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the cgroups of the run say of memory. None where they do not say.

    `oom_kills` is of the innermost group; the rest is of the group, that one or one around it, that has the lowest
    limit. `hits` counts how often it was reached.
    """

    oom_kills: int | None = None
    limit: int | None = None
    high: int | None = None
    peak: int | None = None
    hits: int | None = None


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


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory at one moment, as the parent sees it. None where that cannot be read.

    `used` is what cannot be given back at once, of the `limit` that is nearest: that of the host, or of the run's
    cgroup. `private` is what each process of the run holds for itself, by its number; pages that a forked child still
    shares with its parent count for both. `waiting` is the share of the last ten seconds in percent in which all tasks
    waited for memory, `swap_in` bytes per second.
    """

    time: float
    used: int | None = None
    limit: int | None = None
    bound: Literal["host", "cgroup"] = "host"
    private: dict[int, int] = msgspec.field(default_factory=dict)
    waiting: float | None = None
    swap_in: float | None = None
    shm_used: int | None = None
    shm_size: int | None = None

    @property
    def share(self) -> float:
        """Of the limit, from 0 to 1."""
        return self.used / self.limit if self.used is not None and self.limit else 0.0


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one holder of the user's held at the last look into the process, and the line that fills it."""

    name: str
    nbytes: int
    items: int = 0
    file: str = ""
    line: int = 0


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended without a word, as only an outsider can see it.

    `part` says what it was to the run. `surfaced` is the line of another process that noticed, where one did.
    `oom_kills` counts what the kernel killed for memory in the run's cgroup in the last seconds before the end,
    `host_oom_kills` on the whole host, `limit_hits` how often the limit of the group was reached. `shm_low` is the
    least free space of /dev/shm in that time. `samples` are of the host's memory in the last seconds, `holders` what
    held most in the process when it was last looked at.
    """

    pid: int
    rank: int = 0
    part: Literal["script", "worker", "child"] = "script"
    signal: str | None = None
    exit_status: int | None = None
    ended: float = 0.0
    box: BoxContents | None = None
    threads: tuple[ThreadStack, ...] = ()
    fatal_line: str = ""
    surfaced: StackFrame | None = None
    oom_kills: int | None = None
    host_oom_kills: int | None = None
    kernel_lines: tuple[str, ...] = ()
    memory_limit: int | None = None
    memory_high: int | None = None
    memory_peak: int | None = None
    limit_hits: int | None = None
    peak_rss: int | None = None
    host_memory: int | None = None
    swap_free: int | None = None
    shm_free: int | None = None
    shm_low: int | None = None
    shm_size: int | None = None
    core_pattern: str = ""
    samples: tuple[MemorySample, ...] = ()
    holders: tuple[HeldMemory, ...] = ()


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the driver reported of a GPU while the run went on, by NVIDIA's number for it."""

    time: float
    code: int


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as NVML sees it. None where it does not say.

    `index` is NVML's own. `ordinal` is the number that the run's processes know it by, as far as the environment of
    the run tells: None if they do not see it, or if the order cannot be known. `ecc_uncorrected` counts since the
    driver was loaded, `ecc_new` since the run began. `memory_others` is held by processes that are not of this run.
    `throttled` and `hottest` are of all the run, `throttle` and `temperature` of that moment. `lost` is NVML's word for
    it if the GPU no longer answers. `utilisation` and `memory_utilisation` are percentages of the last moment in which
    a kernel ran, and in which memory was read or written.
    """

    index: int
    uuid: str = ""
    bus: str = ""
    name: str = ""
    ordinal: int | None = None
    lost: str = ""
    xids: tuple[Xid, ...] = ()
    ecc_uncorrected: int | None = None
    ecc_new: int | None = None
    rows_remapped: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_retired: int | None = None
    throttle: tuple[str, ...] = ()
    throttled: tuple[str, ...] = ()
    temperature: int | None = None
    hottest: int | None = None
    slowdown_temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    utilisation: int | None = None
    memory_utilisation: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    memory_others: int | None = None


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of the host when something about them last changed, and at the end of the run."""

    time: float
    driver: str = ""
    gpus: tuple[GpuState, ...] = ()

    def of(self, uuid: str) -> GpuState | None:
        """One GPU by its UUID, with or without NVML's `GPU-` before it."""
        wanted = uuid.removeprefix("GPU-")
        return next((gpu for gpu in self.gpus if gpu.uuid.removeprefix("GPU-") == wanted), None)


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What a DataLoader worker saw of its own exception, carried to the main process beside it."""

    pid: int
    worker: int | None
    exception: str
    message: str
    stage: Literal["sample", "collate", "other"]
    index: Any = None
    batch_indices: tuple[Any, ...] = ()
    frames: tuple[StackFrame, ...] = ()
    columns: tuple[int, int] = (1, 1)
    sample: str = ""
    sample_shapes: tuple[str, ...] = ()
    shared: int = 0  # bytes that were to be shared with other processes when it failed
    sizes: dict[str, int] = msgspec.field(default_factory=dict)  # of its memory, and its limits: VmSize, RLIMIT_AS


def encode(record: msgspec.Struct) -> bytes:
    """Readable JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
