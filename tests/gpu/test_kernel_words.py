"""What the kernels of this card and this torch really say, and what NVML says of the card. Each is a process."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import clean_environment
from streams import on_terminal, through_pipes, watched

from torchmedic.detect.failures.kernel_asserts import assertions, words_of
from torchmedic.runfolder.gpu import read_gpu_health

pytestmark = pytest.mark.gpu

HEAD = "import torch\nfrom torch.nn import functional as F\nd = dict(device='cuda')\nbad = torch.tensor([1, 9], **d)\n"
# The operation of ATen, and a call of it that fails on the device.
CALLS = {
    "nll_loss": "F.cross_entropy(torch.randn(2, 5, **d), bad)",
    "nll_loss2d": "F.cross_entropy(torch.randn(2, 5, 3, 3, **d), torch.full((2, 3, 3), 7, **d))",
    "multi_margin_loss": "F.multi_margin_loss(torch.randn(2, 5, **d), bad)",
    "embedding": "F.embedding(bad, torch.randn(5, 64, **d))",
    "index_select": "torch.randn(5, 3, **d).index_select(0, bad)",
    "index": "torch.randn(5, 3, 7, **d)[:, bad]",
    "index_put": "torch.zeros(5, 3, **d)[bad] = 1.0",
    "index_add": "torch.zeros(5, 3, **d).index_add_(0, bad, torch.ones(2, 3, **d))",
    "take": "torch.randn(5, **d).take(bad)",
    "gather": "torch.randn(5, 3, **d).gather(1, bad.view(2, 1))",
    "scatter": "torch.zeros(5, 3, **d).scatter_(1, bad.view(2, 1), 1.0)",
    "one_hot": "F.one_hot(bad, 4)",
    "embedding_bag": "F.embedding_bag(bad.view(1, 2), torch.randn(5, 8, **d))",
    "multinomial": "torch.multinomial(torch.tensor([[0.5, float('nan')]], **d), 3, replacement=True)",
    "bernoulli": "torch.bernoulli(torch.tensor([2.0], **d))",
    "binary_cross_entropy": "F.binary_cross_entropy(torch.tensor([1.5], **d), torch.ones(1, **d))",
    "_assert_async": "torch._assert_async(torch.zeros(1, **d), 'my own words')",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("words")

    def run(call: str) -> str:
        code = f"{HEAD}{call}\ntorch.cuda.synchronize()"
        return subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=clean_environment(), capture_output=True, text=True
        ).stderr

    with ThreadPoolExecutor(6) as pool:
        return dict(zip(CALLS, pool.map(run, CALLS.values()), strict=True))


@pytest.mark.parametrize("operation", CALLS)
def test_which_operation_it_can_be(said: dict[str, str], operation: str) -> None:
    found = assertions(said[operation])
    assert len(found) >= 1, said[operation]
    assert found[0].could_be(f"aten.{operation}.default") is True, found


SCRIPT = f"{HEAD}F.embedding(bad, torch.randn(5, 64, **d)).sum().item()"


@pytest.mark.parametrize("way", [through_pipes, on_terminal])
def test_heard_while_it_runs(tmp_path: Path, way: object) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    written = way(tmp_path, watched("train.py"))  # type: ignore[operator]
    assert words_of(tmp_path / "run", 0)[0].could_be("embedding") is True, written.stderr


# Writes far outside of any allocation.
ASTRAY = """
import time
import torch
import triton
import triton.language as tl


@triton.jit
def astray(pointer):
    tl.store(pointer + (1 << 44), 1.0)


x = torch.zeros(1, device="cuda")
time.sleep(3)  # so that the card is being watched
astray[(1,)](x)
torch.cuda.synchronize()
"""


def test_the_health_of_the_card(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "train.py").write_text(ASTRAY)
    written = through_pipes(tmp_path, watched("train.py"))
    health = read_gpu_health(tmp_path / "run")
    assert health is not None, written.stderr
    card = next(gpu for gpu in health.gpus if gpu.ordinal == 0)
    assert card.temperature is not None
    assert card.memory_total is not None
    assert card.lost == ""
    assert [xid.code for xid in card.xids], written.stderr  # 31: an access to memory that is not mapped
