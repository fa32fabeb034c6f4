"""The GPUs before a run, from NVML. Runs as a separate program, because the driver of a broken GPU may never answer."""

from __future__ import annotations

from typing import Any

import msgspec

from torchmedic.records.gpu import GpuHealth
from torchmedic.supervise.gpu.nvml import Gpus

PROHIBITED, EXCLUSIVE = 2, 3
_NO_DRIVER = (9, 12)  # driver not loaded, library not found
_NO_PROCESSES: tuple[Any, ...] = ()


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a GPU that are not part of its health. None where NVML gives no value."""

    index: int
    capability: tuple[int, int] | None = None
    display: bool | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()


class Cards(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs. `error` is NVML's message if it fails; everything is empty if there is no driver."""

    health: GpuHealth | None = None
    cards: tuple[Card, ...] = ()
    cuda: int | None = None
    error: str = ""


def read(nvml: Any) -> Cards:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Cards() if error.value in _NO_DRIVER else Cards(error=str(error))

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(*args)
        except (nvml.NVMLError, AttributeError):
            return None

    def card(index: int) -> Card:
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
        display = ask("nvmlDeviceGetDisplayActive", handle)
        persistence = ask("nvmlDeviceGetPersistenceMode", handle)
        running = ask("nvmlDeviceGetComputeRunningProcesses", handle) or _NO_PROCESSES
        return Card(
            index=index,
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            display=None if display is None else bool(display),
            persistence=None if persistence is None else bool(persistence),
            compute_mode=ask("nvmlDeviceGetComputeMode", handle),
            processes=tuple((process.pid, process.usedGpuMemory) for process in running),
        )

    health = Gpus(nvml).read()
    return Cards(
        health=health,
        cards=tuple(card(gpu.index) for gpu in health.gpus),
        cuda=ask("nvmlSystemGetCudaDriverVersion_v2"),
    )


def main() -> None:
    try:
        import pynvml
    except ImportError:
        found = Cards()
    else:
        found = read(pynvml)
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
