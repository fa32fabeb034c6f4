"""Memory of the host that a real driver refuses to pin.

python -m pytest -m gpu tests/gpu/test_host_limits_cuda.py -s
"""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, torchmedic

pytestmark = pytest.mark.gpu

# The host is not exhausted for real: the process itself may only have a little more address space.
PINNED = """
import resource
import torch

torch.ones(8).pin_memory()
x = torch.ones(8, device="cuda")
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), -1))
class Buffers:
    def __init__(self, count):
        self.parts = [{make} for _ in range(count)]  # <- cause
Buffers(3)
"""


@pytest.mark.parametrize(
    "make", ["torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)", "torch.empty(100 << 20).pin_memory()"]
)
def test_memory_of_the_host_that_cannot_be_pinned(tmp_path: Path, make: str) -> None:
    source = PINNED.format(make=make)
    finished = torchmedic(tmp_path, *_written(tmp_path, source))
    print(finished.stderr)
    if finished.returncode == 0:
        pytest.skip("this driver does not go by the limit of the address space")
    found = finished.only
    assert found.code in ("TM416", "TM414"), finished.stderr  # the plain tensor may be refused before it is pinned
    assert found.cause_location is not None
    assert found.cause_location.line == marked_line(source)
    assert finished.report.outcome.symptom in ("out-of-memory", "cuda-error")  # a call to the kernel may be named
    if found.code == "TM416":
        assert any("it is not the GPU" in fact for fact in found.evidence)


def _written(folder: Path, source: str) -> tuple[str]:
    (folder / "train.py").write_text(source)
    return ("train.py",)
