"""What a kernel said decides what kind of failure it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchmedic.detect.failures.device_errors import DeviceFault, Kind
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.runfolder import gpu

SAID = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed.\n"
)


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("device_assert", "", True),
        ("launch_failure", SAID, True),  # seen on an H200
        ("launch_failure", "", False),
        ("illegal_address", SAID, False),
    ],
)
def test_a_launch_failure_with_words_is_a_failed_check(tmp_path: Path, kind: Kind, said: str, expected: bool) -> None:
    gpu.write_kernel_words(tmp_path, said)
    incident: Any = SimpleNamespace(
        step=3, rank=0, process=SimpleNamespace(run=tmp_path), error=RuntimeError("CUDA error")
    )
    assert LostDevice(incident, DeviceFault(kind=kind, words="CUDA error"), ()).is_assertion is expected
