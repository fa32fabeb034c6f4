"""Waiting for a GPU: a kernel that spins or works, a card that is gone, kernels that are compiled or tried out."""

from __future__ import annotations

from typing import Any

import pytest
from stalls import PID, asked, box, library, process, stall, thread, user

from torchmedic.records.gpu import GpuHealth, GpuState, Xid
from torchmedic.records.inside import MarkView
from torchmedic.records.stall import Stall

WAITS = thread(user())


def _gpu(**fields: Any) -> GpuHealth:
    known = {"index": 0, "name": "H200", "ordinal": 0, "utilisation": 100, "power": 120.0, "power_limit": 700.0}
    return GpuHealth(time=1000.0, gpus=(GpuState(**{**known, "memory_utilisation": 0, **fields}),))


def _waits(gpu: GpuHealth, **view: Any) -> Stall:
    return stall(WAITS, process(demand=1.0), view={"device_busy": True, **view}, gpu=gpu)


def test_a_kernel_that_keeps_the_gpu_busy_without_drawing_power_spins() -> None:
    due = MarkView(what="update", step=3, file="/home/me/train.py", line=9)
    found = asked("gpu_kernel_never_ends", _waits(_gpu(), mark_due=due))
    assert found is not None
    assert (found.severity, found.grade) == ("error", "likely")
    assert found.cause_location is not None
    assert found.cause_location.line == 7
    assert "the device is at the backward pass of step 3" in found.evidence
    assert "H200 0: utilisation 100 %, 120 of 700 W" in found.evidence


@pytest.mark.parametrize(
    ("gpu", "view"),
    [
        (_gpu(power=600.0), {}),
        (_gpu(memory_utilisation=30), {}),
        (_gpu(utilisation=60), {}),
        (_gpu(), {"marks_moved": True}),
        (GpuHealth(time=0.0), {}),
    ],
)
def test_a_gpu_that_works_is_no_hang(gpu: GpuHealth, view: dict[str, Any]) -> None:
    seen = _waits(gpu, **view)
    assert asked("gpu_kernel_never_ends", seen) is None
    note = asked("long_kernel", seen)
    assert note is not None
    assert note.severity == "note"


def test_who_does_not_wait_for_the_gpu_is_not_explained_by_it() -> None:
    for seen in (stall(WAITS, view={"device_busy": False}, gpu=_gpu()), stall(thread(user(), moved=True), gpu=_gpu())):
        assert asked("gpu_kernel_never_ends", seen) is None
        assert asked("long_kernel", seen) is None


@pytest.mark.parametrize(
    ("state", "grade"),
    [
        ({"lost": "GPU is lost"}, "proven"),
        ({"xids": (Xid(time=990.0, code=79),)}, "proven"),
        ({"xids": (Xid(time=990.0, code=43),)}, None),  # of some program, which is told by an exception
        ({"xids": (Xid(time=100.0, code=79),)}, None),  # long before, and the run went on
        ({"xids": (Xid(time=980.0, code=79),)}, None),  # 15 seconds before the run began to stand still
        ({"xids": (Xid(time=990.0, code=109),)}, None),  # of some program, whose context was slow to give way
        ({"lost": "GPU is lost", "ordinal": None}, None),  # a card of others
        ({}, None),
    ],
)
def test_a_gpu_that_failed_while_it_is_waited_for(state: dict[str, Any], grade: str | None) -> None:
    found = asked("gpu_lost", stall(WAITS, gpu=_gpu(**state), view={"device_busy": True}))
    assert (found.grade if found is not None else None) == grade
    found = asked("gpu_lost", stall(WAITS, gpu=_gpu(**state), box=box(updates=5), mute=(PID,)))
    assert (found.grade if found is not None else None) == grade, "its process trained, and does not answer"


def test_an_xid_is_not_the_reason_of_a_process_that_still_starts_cuda() -> None:
    health = _gpu(xids=(Xid(time=999.0, code=79),))
    for seen in (stall(WAITS, gpu=health), stall(WAITS, gpu=health, box=box(updates=0), mute=(PID,))):
        assert asked("gpu_lost", seen) is None


def test_a_failed_gpu_that_nobody_waits_for_is_no_hang() -> None:
    assert asked("gpu_lost", stall(thread(user(), moved=True), gpu=_gpu(lost="GPU is lost"))) is None


def test_kernels_that_the_driver_compiles() -> None:
    own = process(demand=1.0)
    new = {"architectures": ("sm_80", "sm_90", "compute_90"), "gpus": (("RTX 6090", (13, 0)),), "device_busy": False}
    found = asked("ptx_compiled_by_driver", stall(WAITS, own, view=new))
    assert found is not None
    assert found.severity == "note"
    assert "RTX 6090 (sm_130)" in found.message
    assert asked("ptx_compiled_by_driver", stall(WAITS, own, view={**new, "gpus": (("H200", (9, 0)),)})) is None
    assert asked("ptx_compiled_by_driver", stall(WAITS, own, view=new, box=box(updates=5))) is None, (
        "the first steps have been made"
    )
    assert asked("ptx_compiled_by_driver", stall(WAITS, process(), view=new)) is None, "nobody is at work"
    loaded = process(demand=1.0, libraries=("libnvidia-ptxjitcompiler",))
    assert asked("ptx_compiled_by_driver", stall(WAITS, loaded, view={"device_busy": False})) is not None
    assert (
        asked("ptx_compiled_by_driver", stall(WAITS, process(demand=1.0, native=("f (libnvidia-ptxjitcompiler.so)",))))
        is not None
    )


def test_kernels_that_are_tried_out() -> None:
    triton = thread(
        library("triton/compiler/compiler.py", "compile"),
        library("triton/runtime/autotuner.py", "_bench"),
        library("triton/runtime/autotuner.py", "run"),
        user(12, "kernel[grid](x)"),
        moved=True,
    )
    found = asked("autotuning", stall(triton, view={"device_busy": False}))
    assert found is not None
    assert "Triton" in found.message
    assert found.cause_location is not None
    assert found.cause_location.line == 12
    launched = thread(library("triton/runtime/autotuner.py", "run"), user(), moved=True)
    assert asked("autotuning", stall(launched)) is None
    imported = thread(library("torch/_inductor/select_algorithm.py", "<module>"), user(), moved=True)
    assert asked("autotuning", stall(imported)) is None


def test_cudnn_that_tries_its_algorithms_out() -> None:
    conv = thread(library("torch/nn/modules/conv.py", "_conv_forward"), user(5, "model(x)"))
    view = {"tunes": True, "device_busy": False}
    found = asked("autotuning", stall(conv, process(demand=1.0), view=view))
    assert found is not None
    assert "cuDNN" in found.message
    assert asked("autotuning", stall(conv, process(demand=1.0), view={**view, "tunes": False})) is None
    assert asked("autotuning", stall(conv, process(), view=view)) is None, "nobody is at work"
    assert asked("autotuning", stall(thread(user()), process(demand=1.0), view=view)) is None, "no convolution"
