"""The GPUs of the host, as NVML reports them. Nothing here imports torch: the parent reads all of it."""

from __future__ import annotations

import msgspec


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a GPU that the driver reported during the run. `code` is NVIDIA's number for it."""

    time: float
    code: int


class GpuState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, as NVML reports it. None where NVML gives no value.

    `index` is NVML's. `ordinal` is the number of the GPU in the run's processes, from the environment of the run: None
    if they do not see the GPU, or if the order is unknown. `ecc_uncorrected` counts since the driver was loaded,
    `ecc_new` since the start of the run. `throttled` and `hottest` are for the whole run, `throttle` and `temperature`
    for this moment. `lost` is NVML's reason if the GPU no longer answers. `utilisation` and `memory_utilisation` are
    the percentages of the last sample period in which a kernel ran, and in which memory was read or written.
    """

    index: int
    uuid: str = ""
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


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of the host, recorded when their state changes and at the end of the run."""

    time: float
    driver: str = ""
    gpus: tuple[GpuState, ...] = ()

    def of(self, uuid: str) -> GpuState | None:
        """The GPU with a UUID, with or without NVML's prefix `GPU-`."""
        wanted = uuid.removeprefix("GPU-")
        return next((gpu for gpu in self.gpus if gpu.uuid.removeprefix("GPU-") == wanted), None)
