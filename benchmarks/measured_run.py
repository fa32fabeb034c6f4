"""Runs a script under torchmedic for a measurement, and saves the results of benchmarks."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def run_under_torchmedic(folder: Path, source: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a script with `torchmedic run` in a folder, and return the finished process and the diagnoses."""
    (folder / "train.py").write_text(source)
    command = [sys.executable, "-m", "torchmedic", "run", "--output", "run", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "run" / "report.json").read_text())["diagnoses"]


def environment(device: str) -> dict[str, str]:
    """The command and the versions that belong to every result."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }


def save(name: str | None, result: dict[str, Any], title: str = "", text: str = "") -> None:
    """Write results/NAME.json and, with a title, results/NAME.md; nothing without a name."""
    if name is None:
        return
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if title:
        (RESULTS / f"{name}.md").write_text(f"# {title}\n\n{text}\n")
