"""GPUs as NVML tells of them, told by a stand-in for NVML."""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import awaited

from torchmedic.runfolder import gpu as gpu_files
from torchmedic.supervise.gpu import gpu_health
from torchmedic.supervise.gpu.gpu_health import GpuWatch, uses_gpu
from torchmedic.supervise.gpu.nvml import Gpus, visible


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class FakeNvml(types.ModuleType):
    """Two GPUs. What is in `answers` is told of the first, the rest is not supported."""

    NVMLError = NVMLError
    nvmlEventTypeXidCriticalError = 8
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.answers: dict[str, Any] = {}
        self.pending: list[tuple[int, int]] = []
        self.registered: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(device: int, *_: Any) -> Any:
            if device != 0 or name not in self.answers:
                raise NVMLError(3)
            value = self.answers[name]
            if isinstance(value, NVMLError):
                raise value
            return value

        return answer

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> bytes:
        return b"GPU-%d" % device

    def nvmlDeviceGetName(self, device: int) -> str:
        return "H200"

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetSupportedEventTypes(self, device: int) -> int:
        return 8 + 2

    def nvmlDeviceRegisterEvents(self, device: int, types: int, events: str) -> None:
        assert (types, events) == (8, "set")
        self.registered.append(device)

    def nvmlEventSetWait_v2(self, events: str, timeout: int) -> types.SimpleNamespace:
        assert timeout == 0
        if not self.pending:
            raise NVMLError(10)
        device, code = self.pending.pop(0)
        return types.SimpleNamespace(device=device, eventData=code)


WELL = {
    "nvmlDeviceGetTotalEccErrors": 2,
    "nvmlDeviceGetRemappedRows": (1, 2, 0, 0),
    "nvmlDeviceGetRetiredPages": [],
    "nvmlDeviceGetCurrentClocksEventReasons": 0x04,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureThreshold": 87,
    "nvmlDeviceGetPowerUsage": 350_500,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=30, total=100),
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeNvml()
    fake.answers = dict(WELL)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_everything_that_is_told(nvml: FakeNvml) -> None:
    health = Gpus(nvml).read()
    first, second = health.gpus
    assert (health.driver, first.uuid, first.name) == ("570.1", "GPU-0", "H200")
    assert (first.index, first.ordinal, second.ordinal) == (0, 0, 1)
    assert (first.ecc_uncorrected, first.ecc_new, first.rows_remapped, first.remap_pending) == (2, 0, 3, False)
    assert (first.pages_retired, first.throttle, first.temperature) == (0, ("power cap",), 61)
    assert (first.power, first.power_limit, first.slowdown_temperature) == (350.5, 700.0, 87)
    assert (first.memory_used, first.memory_total) == (30, 100)
    assert (second.temperature, second.throttle, second.lost) == (None, (), "")
    assert health.of("GPU-1") == health.of("1") == second


def test_what_was_is_not_forgotten(nvml: FakeNvml) -> None:
    gpus = Gpus(nvml)
    nvml.answers |= {"nvmlDeviceGetCurrentClocksEventReasons": 0x48, "nvmlDeviceGetTemperature": 90}
    gpus.read()
    nvml.answers |= {"nvmlDeviceGetCurrentClocksEventReasons": 0x01, "nvmlDeviceGetTemperature": 40}
    first = gpus.read().gpus[0]
    assert (first.throttle, first.temperature) == (("idle",), 40)
    assert first.throttled == ("idle", "hardware slowdown", "hardware thermal slowdown")
    assert first.hottest == 90


def test_events_and_what_is_new(nvml: FakeNvml) -> None:
    gpus = Gpus(nvml)
    gpus.read()
    assert nvml.registered == [0, 1]
    assert not gpus.events()
    nvml.pending = [(0, 31), (0, 43), (1, 79)]
    nvml.answers |= {"nvmlDeviceGetTotalEccErrors": 5, "nvmlDeviceGetTemperature": NVMLError(15)}
    assert gpus.events()
    first, second = gpus.read().gpus
    assert [xid.code for xid in first.xids] == [31, 43]
    assert [xid.code for xid in second.xids] == [79]
    assert (first.ecc_uncorrected, first.ecc_new, first.lost) == (5, 3, "GPU is lost")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": " 1 , 2"}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-aa11"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa"}, []),  # two begin so
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-cc33/3/0"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "nonsense"}, []),
    ],
)
def test_which_gpu_is_which(environ: dict[str, str], expected: list[int]) -> None:
    uuids = ["GPU-aa11", "GPU-aa22", "GPU-cc33"]
    parents = {"MIG-1234": "GPU-aa22"}
    assert visible(environ, uuids, ["H200"] * 3, parents.get) == expected


def test_the_order_of_unlike_gpus_is_known_only_if_asked_for() -> None:
    uuids, names = ["GPU-a", "GPU-b"], ["T4", "H200"]
    assert visible({}, uuids, names, dict[str, str]().get) is None
    assert visible({"CUDA_VISIBLE_DEVICES": "1"}, uuids, names, dict[str, str]().get) is None
    assert visible({"CUDA_VISIBLE_DEVICES": "GPU-b"}, uuids, names, dict[str, str]().get) == [1]
    assert visible({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, uuids, names, dict[str, str]().get) == [0, 1]


def test_who_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not uses_gpu(os.getpid())
    assert not uses_gpu(2**30)
    for target, uses in (("/dev/nvidia0", True), ("/dev/nvidiactl", False), ("/dev/nvidia-uvm", False)):
        monkeypatch.setattr(os, "readlink", lambda path, target=target: target)
        assert uses_gpu(os.getpid()) is uses


def watch(monkeypatch: pytest.MonkeyPatch, run: Path) -> GpuWatch:
    monkeypatch.setattr(gpu_health, "_DEVICES", (str(run),))  # there
    monkeypatch.setattr(gpu_health, "uses_gpu", lambda pid: pid == 11)
    monkeypatch.setattr(gpu_health, "_EVENT_SECONDS", 0.01)
    return GpuWatch(run)


def test_a_run_on_a_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watching = watch(monkeypatch, tmp_path)
    watching.look([10])
    watching._looked = time.monotonic() + 1000  # as if it were just now
    watching.look([11])  # too soon for another look
    assert watching._thread is None
    watching._looked = -10.0
    watching.look([10, 11])
    awaited(lambda: gpu_files.read_gpu_health(tmp_path))
    nvml.pending.append((0, 31))
    awaited(lambda: (health := gpu_files.read_gpu_health(tmp_path)) and health.gpus[0].xids)
    nvml.answers["nvmlDeviceGetTemperature"] = 71  # no reason to write
    nvml.pending.append((1, 63))
    watching.last_look()
    last = gpu_files.read_gpu_health(tmp_path)
    assert last is not None
    assert last.gpus[0].temperature == 71
    assert [[xid.code for xid in gpu.xids] for gpu in last.gpus] == [[31], [63]]


@pytest.mark.parametrize("trouble", ["no package", "no driver", "old package"])
def test_without(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str) -> None:
    watching = watch(monkeypatch, tmp_path)
    if trouble == "no package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif trouble == "no driver":
        monkeypatch.setattr(nvml, "nvmlInit", lambda: nvml.nvmlDeviceGetSerial(1), raising=False)
    else:
        nvml.__dict__["nvmlEventSetCreate"] = nvml.__dict__["nvmlDeviceGetRemappedRows"] = None
    watching.look([11])
    watching.last_look()
    health = gpu_files.read_gpu_health(tmp_path)
    assert (health is None) == (trouble != "old package")
    assert health is None or health.gpus[0].rows_remapped is None


def test_never_without_a_gpu(nvml: FakeNvml, tmp_path: Path) -> None:
    watching = GpuWatch(tmp_path)
    watching.look([os.getpid()])
    watching.last_look()
    assert list(tmp_path.iterdir()) == []
