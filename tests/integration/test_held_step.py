"""A step that an exception has ended is held, and a patch is tried on it from another process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchmedic.cli import main
from torchmedic.runfolder import held

FAILING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.one(x)
        return self.two(hidden[:, :15])

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train():
    for _ in range(5):
        loss = net(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

train()
"""
GOOD = """--- train.py
+++ train.py
@@ -11,2 +11,3 @@
         hidden = self.one(x)
-        return self.two(hidden[:, :15])
+        hidden = hidden.relu()
+        return self.two(hidden)
"""


@pytest.mark.slow
def test_a_patch_is_tried_on_the_step_that_an_exception_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "good.diff").write_text(GOOD)
    (tmp_path / "bad.diff").write_text(GOOD.replace("self.two(hidden)", "self.two(hidden[:, :14])"))
    command = [sys.executable, "-m", "torchmedic", "run", "--hold", "100", "--output", "run", "train.py"]
    run = tmp_path / "run"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not held.held_steps(run) and process.poll() is None:
            time.sleep(0.1)
        assert main(["try", str(run), str(tmp_path / "good.diff")]) == 0
        assert main(["try", str(run), str(tmp_path / "bad.diff")]) == 1
        assert main(["try", "--release", str(run)]) == 0
        _, said = process.communicate(timeout=60)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("passed: loss ")
    assert told[1].startswith("failed: RuntimeError: mat1 and mat2")
    assert process.returncode == 1
    assert "error[TM151]" in said
    assert main(["try", str(run), str(tmp_path / "good.diff")]) == 1
    assert "holds no step" in capsys.readouterr().err
