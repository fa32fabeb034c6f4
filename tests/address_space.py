"""Scripts that may have only so much more address space than they have when they ask: how they begin."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from running import run_script

from torchmedic.records import Diagnosis

HEAD_WITH_ROOM = """
import resource
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def room(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, -1))
"""


def marked(source: str) -> list[int]:
    """The lines that are to blame."""
    return [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# <- cause")]


def ran_out(folder: Path, body: str, codes: Collection[str]) -> Diagnosis:
    """The diagnosis of a script that runs out: with one of these codes, at the line that is marked."""
    source = HEAD_WITH_ROOM + body
    finished = run_script(folder, source)
    assert finished.returncode == 1, finished.stderr
    assert "fault of its own" not in finished.stderr
    found = finished.report.diagnoses[-1]
    assert found.code in codes, finished.stderr
    assert found.cause_location is not None
    assert found.cause_location.line in marked(source), finished.stderr
    return found
