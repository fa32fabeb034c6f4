"""`torchmedic preflight` and `watch` where there is a card: NVML and torch agree about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment, torchmedic

pytestmark = pytest.mark.gpu

TRAIN = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
torch.cuda.synchronize()
"""


def test_a_card_that_works(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "preflight", "--format", "json", "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["GPU driver"]["status"] == "ok", found["GPU driver"]
    assert "CUDA" in found["GPU driver"]["reason"]
    assert found["GPU 0"]["status"] in ("ok", "warn"), found["GPU 0"]


def test_the_view_of_a_run_on_a_card(tmp_path: Path) -> None:
    # Long enough for the parent to see that the card is in use.
    (tmp_path / "train.py").write_text(TRAIN + "import time\ntime.sleep(4)\n")
    assert torchmedic(tmp_path, "train.py").returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "watch", "run"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "GPU 0" in done.stdout
    assert "the run has ended with status 0 after 50 steps" in done.stdout
