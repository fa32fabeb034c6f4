"""Nothing that is done to torchmedic's files or processes ends a training that would have gone on without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

pytestmark = pytest.mark.timeout(300)

HEAD = """
import glob, os, sys
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()


train(3)
"""

# What a person or a full disk may do to the run folder while the run goes on.
ATTACKS = {
    "every file is truncated": """
for path in glob.glob("run/**", recursive=True) + glob.glob("run/*/.*") + glob.glob("run/.*"):
    if os.path.isfile(path):
        os.truncate(path, 0)
""",
    "every descriptor is truncated": """
for number in os.listdir("/proc/self/fd"):
    target = os.readlink(f"/proc/self/fd/{number}") if os.path.lexists(f"/proc/self/fd/{number}") else ""
    if "torchmedic" in target or os.path.abspath("run") in target:
        try:
            os.truncate(f"/proc/self/fd/{number}", 0)
        except OSError:
            pass
""",
    "every descriptor is closed": "os.closerange(3, 256)\n",
    "the folder is deleted": "import shutil\nshutil.rmtree('run')\n",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_run_folder_cannot_kill_the_run(tmp_path: Path, name: str) -> None:
    finished = run_script(tmp_path, HEAD + ATTACKS[name] + "train(2000)\nprint('trained')\n")

    assert (finished.returncode, finished.stdout) == (0, "trained\n"), finished.stderr
    assert "fault of its own" not in finished.stderr
