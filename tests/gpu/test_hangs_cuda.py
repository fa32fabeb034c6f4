"""Runs that wait for the GPU: a kernel that spins, one that works, kernels that are compiled or tried out.

    python -m pytest tests/gpu/test_hangs_cuda.py

Each script is a process of its own, bounded to half a minute should nobody end it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import scripts
from running import Finished, marked_line, torchmedic

pytestmark = pytest.mark.gpu

# Sizes grow until the driver needs several seconds for one module: how long that takes differs from card to card.
PTX = """
import ctypes
import time

import torch

x = torch.zeros(8, device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")


def module(count):
    chain = "\\n".join(f"fma.rn.f32 %f{n + 1}, %f{n}, %f{n // 2}, %f{n // 3};" for n in range(count))
    return f'''.version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 p)
{{
.reg .f32 %f<{count + 2}>;
.reg .b64 %rd<3>;
ld.param.u64 %rd1, [p];
cvta.to.global.u64 %rd2, %rd1;
ld.global.f32 %f0, [%rd2];
{chain}
st.global.f32 [%rd2], %f{count};
ret;
}}'''.encode()


took, count, begun = 0.0, 500, time.monotonic()
while took < 5 and time.monotonic() - begun < 25:
    text, handle, start = module(count), ctypes.c_void_p(), time.monotonic()
    assert cuda.cuModuleLoadData(ctypes.byref(handle), text) == 0  # <- cause
    took, count = time.monotonic() - start, count * 5 // 4  # the time grows faster than the count
print("took", took)
"""

ASLEEP = """
import time

import torch

x = torch.randn(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
for step in range(3):
    x.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
time.sleep(8)  # <- cause
"""

AT_WORK = """
import hashlib

import torch

x = torch.randn(8, device="cuda").square().sum().item()
key = hashlib.pbkdf2_hmac("sha256", b"secret", b"salt", 20_000_000)  # <- cause
"""


def _run(folder: Path, source: str, *options: str) -> Finished:
    (folder / "train.py").write_text(source)
    return torchmedic(folder, "--stall-after", "2", *options, "train.py", CUDA_CACHE_DISABLE="1")


def _lines(finished: Finished, code: str) -> list[int | None]:
    found = [each for each in finished.report.diagnoses if each.code == code]
    return [each.cause_location.line if each.cause_location is not None else None for each in found]


@pytest.mark.parametrize(("code", "source"), scripts("fails", gpu=True, hangs=True))
def test_what_waits_for_the_gpu_is_told_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    finished = _run(tmp_path, source, "--on-stall", "kill")
    assert marked_line(source) in _lines(finished, code), (finished.stderr, finished.report)
    errors = {each.code for each in finished.report.diagnoses if each.severity != "note"}
    assert errors <= {code}, finished.stderr
    if code in ("TM530", "TM556"):
        told = next(each for each in finished.report.diagnoses if each.code == code)
        assert any("utilisation" in fact for fact in told.evidence), told.evidence


@pytest.mark.parametrize(("code", "source"), scripts("passes", gpu=True, hangs=True))
def test_what_is_only_slow_is_left_in_peace(tmp_path: Path, code: str, source: str) -> None:
    finished = _run(tmp_path, source)
    assert finished.returncode == 0, finished.stderr
    assert [each.code for each in finished.report.diagnoses if each.severity != "note"] == [], finished.stderr


def test_ptx_that_the_driver_compiles_is_no_hang(tmp_path: Path) -> None:
    finished = _run(tmp_path, PTX)
    assert finished.returncode == 0, finished.stderr
    if float(finished.stdout.split()[-1]) < 5:
        pytest.skip(f"the driver compiles too fast here: {finished.stdout}")
    assert marked_line(PTX) in _lines(finished, "TM551"), (finished.stderr, finished.report)


def test_work_on_the_cpu_is_not_taken_for_the_compiler_of_the_driver(tmp_path: Path) -> None:
    finished = _run(tmp_path, AT_WORK)
    assert finished.returncode == 0, finished.stderr
    assert marked_line(AT_WORK) in _lines(finished, "TM558"), (finished.stderr, finished.report)


def test_a_process_that_sleeps_beside_an_idle_gpu_is_no_hang(tmp_path: Path) -> None:
    finished = _run(tmp_path, ASLEEP)
    assert finished.returncode == 0, finished.stderr
    assert marked_line(ASLEEP) in _lines(finished, "TM557"), (finished.stderr, finished.report)
    assert all(each.severity == "note" for each in finished.report.diagnoses), finished.stderr
