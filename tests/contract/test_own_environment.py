"""torchmedic in an environment of its own, as `pipx` and `uv tool` install it, explains the Python of another one."""

from __future__ import annotations

import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from running import torchmedic

pytestmark = pytest.mark.timeout(300)  # a process that imports torch

SCRIPT = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
model(torch.ones(2, 7))  # <- cause
"""
NOT_OURS = ("msgspec", "psutil", "rich", "safetensors", "torchmedic")


def test_a_failure_is_explained(tmp_path: Path) -> None:
    """The other environment has torch, and nothing of what torchmedic needs."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    theirs = tmp_path / "packages"
    theirs.mkdir()
    for entry in packages.iterdir():
        if not entry.name.lower().startswith(NOT_OURS) and entry.suffix not in (".pth", ".dist-info"):
            (theirs / entry.name).symlink_to(entry)
    venv.EnvBuilder(symlinks=True).create(tmp_path / "other")
    python = tmp_path / "other" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (python.parents[1] / "lib" / version / "site-packages" / "theirs.pth").write_text(f"{theirs}\n")
    (tmp_path / "train.py").write_text(SCRIPT)

    finished = torchmedic(tmp_path, "--", str(python), "train.py")

    assert finished.only.code == "TM151", finished.stderr
    assert "fault of its own" not in finished.stderr
