"""A failure on a card becomes a script for everybody, or for the card where it takes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment, torchmedic

pytestmark = pytest.mark.gpu

LOOP = """
import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 8, device="cuda")
    h = model(x)
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

FAILURES = {
    "division": ("(h / (h - h)).mean()", "torch.div(x, y)", False),
    "float16": ("((h.half() * 60000) * 60000).float().mean()", "torch.float16", False),
    "shapes": ("(h @ torch.ones(7, 2, device='cuda')).mean()", "matmul", False),
    "two devices": ("(h + torch.ones(8)).mean()", '.to("cuda")', True),
}


@pytest.mark.parametrize(("loss", "line", "on_card"), FAILURES.values(), ids=FAILURES)
def test_the_script_fails_as_the_run_did(tmp_path: Path, loss: str, line: str, on_card: bool) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(loss=loss))
    finished = torchmedic(tmp_path, "train.py")

    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "repro", str(finished.run)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stdout + done.stderr + finished.stderr
    text = (finished.run / "repro.py").read_text()
    assert line in text
    assert ("cuda" in text.split("import torch")[1]) is on_card
