"""Nothing that is done to torchmedic's files or processes ends a training that would have gone on without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment, run_script, torchmedic

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


def test_a_kill_of_torchmedic_itself_is_reported_afterwards(tmp_path: Path) -> None:
    """The kernel ends the script together with its parent; `torchmedic report` says so."""
    (tmp_path / "train.py").write_text(HEAD + "train(20)\nprint('begun', flush=True)\nwhile True:\n    train(10)\n")
    parent = subprocess.Popen(
        [sys.executable, "-m", "torchmedic", "run", "-o", "run", "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    running = torchmedic_report(tmp_path)
    parent.kill()
    assert parent.wait() == -9
    parent.stdout.close()

    assert "TM805" not in running.stdout
    after = torchmedic_report(tmp_path)
    assert after.returncode == 0, after.stderr
    assert "error[TM805]: the run was killed together with torchmedic" in after.stdout


def torchmedic_report(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchmedic", "report", "run"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )


def test_a_kill_before_torch_is_imported_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nos.kill(os.getpid(), 9)\nimport torch\n")
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 137
    assert (finished.only.code, finished.report.outcome.symptom) == ("TM805", "death")
