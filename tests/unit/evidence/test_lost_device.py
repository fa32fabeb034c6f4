"""What a kernel said decides what kind of failure it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchmedic.detect.failures.device_errors import DeviceFault, Kind
from torchmedic.detect.failures.kernel_asserts import assertions
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.evidence.lost_device.kernel_match import launches
from torchmedic.replay.shadow.cpu_shadow import Seen
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


COMPILED = (
    "/tmp/torchinductor_me/33/c33gt3.py:41: unknown: block: [491,0,0], thread: [3,0,0] "
    "Assertion `index out of bounds: 0 <= tmp4 < 10` failed.\n"
)


def test_a_compiled_kernel_says_how_large_the_dimension_is() -> None:
    (said,) = assertions(COMPILED)
    embedding = Seen("embedding", (), index_invented=True, indexed=frozenset({10, 16}))
    labels = Seen("cross_entropy", (), index_invented=True, indexed=frozenset({32, 2}))
    product = Seen("linear", (), index_invented=False, indexed=frozenset({10}))

    assert said.bound == 10
    assert [launches(said, seen) for seen in (embedding, labels, product)] == [True, False, False]


def test_a_compiled_kernel_for_any_size_may_be_of_each_operation_that_takes_indices() -> None:
    (said,) = assertions(COMPILED.replace("< 10", "< ks0"))
    labels = Seen("cross_entropy", (), index_invented=True, indexed=frozenset({32, 2}))

    assert said.bound is None
    assert launches(said, labels) is True
