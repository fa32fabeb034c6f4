"""The GPUs of the host, as NVML sees them. Nothing here imports torch: the parent reads all of it."""

from __future__ import annotations

import msgspec


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
