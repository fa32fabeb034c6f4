"""The state of this host's GPUs from NVML, by the numbers that CUDA gives them (CUDA_VISIBLE_DEVICES).

Any query may be unsupported; its value is then None.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmedic.records.gpu import GpuHealth, GpuState, Xid

_MAX_XIDS = 32
_LOST = {15: "GPU is lost", 16: "GPU requires a reset"}
_TIMEOUT_ERROR = 10
REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
SERIOUS_REASONS = frozenset(REASONS[bit] for bit in (0x08, 0x20, 0x40, 0x80))


def connect() -> Gpus | None:
    """The GPUs of the host; None without a driver that works."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return Gpus(pynvml)


class Gpus:
    """All GPUs of the host."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            handle
            for index in range(self._ask("nvmlDeviceGetCount") or 0)
            if (handle := self._ask("nvmlDeviceGetHandleByIndex", index)) is not None
        ]
        self._uuids = [_text(self._ask("nvmlDeviceGetUUID", handle)) for handle in self._handles]
        self._names = [_text(self._ask("nvmlDeviceGetName", handle)) for handle in self._handles]
        self._xids: dict[str, list[Xid]] = {}
        self._ecc_before: dict[int, int | None] = {}
        self._throttled: dict[int, int] = {}
        self._hottest: dict[int, int] = {}
        self._shown = visible(os.environ, self._uuids, self._names, self._parent_of) or []
        self._set = self._ask("nvmlEventSetCreate")
        for handle in self._handles if self._set is not None else ():
            wanted = self._nvml.nvmlEventTypeXidCriticalError
            if (self._ask("nvmlDeviceGetSupportedEventTypes", handle) or 0) & wanted:
                self._ask("nvmlDeviceRegisterEvents", handle, wanted, self._set)

    def events(self) -> bool:
        """Read the events that the driver has reported, and return whether there were any."""
        heard = False
        while self._set is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError as error:
                if error.value != _TIMEOUT_ERROR:
                    self._set = None
                break
            except AttributeError:  # an old package
                self._set = None
                break
            heard = True
            # A lost GPU may have no UUID.
            uuid = _text(self._ask("nvmlDeviceGetUUID", event.device)) or (self._uuids[0] if self._uuids else "")
            said = self._xids.setdefault(uuid, [])
            if len(said) < _MAX_XIDS:
                said.append(Xid(time=time.time(), code=int(event.eventData)))
        return heard

    def read(self) -> GpuHealth:
        """The current state of all GPUs."""
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        return GpuHealth(
            time=time.time(), driver=driver, gpus=tuple(self._state(index) for index in range(len(self._handles)))
        )

    def _state(self, index: int) -> GpuState:
        handle = self._handles[index]
        lost: list[str] = []

        def ask(name: str, *args: Any) -> Any:
            return self._ask(name, handle, *args, lost=lost)

        nvml = self._nvml
        ecc = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        before = self._ecc_before.setdefault(index, ecc)
        rows = ask("nvmlDeviceGetRemappedRows")  # correctable, uncorrectable, pending, failed
        retired = ask("nvmlDeviceGetRetiredPages", nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        self._throttled[index] = self._throttled.get(index, 0) | (reasons or 0)
        temperature = ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        self._hottest[index] = max(self._hottest.get(index, 0), temperature or 0)
        memory = ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        return GpuState(
            index=index,
            uuid=self._uuids[index],
            name=self._names[index],
            ordinal=self._shown.index(index) if index in self._shown else None,
            xids=tuple(self._xids.get(self._uuids[index], ())),
            ecc_uncorrected=ecc,
            ecc_new=None if ecc is None or before is None else ecc - before,
            rows_remapped=rows[0] + rows[1] if rows is not None else None,
            remap_pending=bool(rows[2]) if rows is not None else None,
            remap_failed=bool(rows[3]) if rows is not None else None,
            pages_retired=len(retired) if retired is not None else None,
            throttle=_names(reasons or 0),
            throttled=_names(self._throttled[index]),
            temperature=temperature,
            hottest=self._hottest[index] or None,
            slowdown_temperature=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            power=_watts(ask("nvmlDeviceGetPowerUsage")),
            power_limit=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
            utilisation=int(rates.gpu) if rates is not None else None,
            memory_utilisation=int(rates.memory) if rates is not None else None,
            memory_used=int(memory.used) if memory is not None else None,
            memory_total=int(memory.total) if memory is not None else None,
            lost=lost[0] if lost else "",
        )

    def _parent_of(self, mig: str) -> str | None:
        instance = self._ask("nvmlDeviceGetHandleByUUID", mig)
        whole = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", instance) if instance is not None else None
        return _text(self._ask("nvmlDeviceGetUUID", whole)) if whole is not None else None

    def _ask(self, name: str, *args: Any, lost: list[str] | None = None) -> Any:
        """Ask NVML; None if there is no answer. If the GPU is lost, the reason is appended to `lost`."""
        question: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if question is None:
            return None
        try:
            return question(*args)
        except self._nvml.NVMLError as error:
            if lost is not None and (word := _LOST.get(error.value)) is not None:
                lost.append(word)
            return None


def _names(reasons: int) -> tuple[str, ...]:
    return tuple(name for bit, name in REASONS.items() if reasons & bit)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def visible(
    environ: Mapping[str, str], uuids: Sequence[str], names: Sequence[str], parent_of: Callable[[str], str | None]
) -> list[int] | None:
    """The NVML indices of the GPUs that CUDA shows, in CUDA's order; None if that order is unknown.

    Args:
        environ: The environment of the process.
        uuids: The UUIDs of all GPUs in NVML's order, which is the order of the PCI bus.
        names: Their models. CUDA lists the fastest first; if all models are equal, this is NVML's order.
        parent_of: Returns the UUID of the GPU that a MIG instance is a part of.
    """
    order_known = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(names)) <= 1
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(range(len(uuids))) if order_known else None
    found: list[int] = []
    words = [word.strip() for word in value.split(",")]
    if not order_known and re.match(r"\d", words[0]):
        return None
    for word in words:
        index = _index(word, uuids, parent_of)
        if index is None:
            break  # CUDA ignores everything after the first GPU that does not exist
        if index in found and not word.startswith("MIG-"):
            return []  # CUDA shows no GPU at all if one is named twice
        found.append(index)
    return found


def _index(word: str, uuids: Sequence[str], parent_of: Callable[[str], str | None]) -> int | None:
    number = re.match(r"[+]?\d+", word)
    if number is not None:
        return int(number[0]) if int(number[0]) < len(uuids) else None
    if word.startswith("MIG-"):
        old = re.match(r"MIG-(GPU-[^/]+)/", word)
        whole = old[1] if old is not None else parent_of(word)
        return uuids.index(whole) if whole in uuids else None
    # A unique prefix is enough.
    alike = [index for index, uuid in enumerate(uuids) if uuid.startswith(word)] if word.startswith("GPU-") else []
    return alike[0] if len(alike) == 1 else None
