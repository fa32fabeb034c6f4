"""An ordinary Python error explains itself: nothing is printed after its traceback, and the report still has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

TRAIN = """
import torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
"""
PLAIN = {
    "KeyError": "{}['x']",
    "FileNotFoundError": "open('nothing.csv')",
    "ImportError": "from torch import no_such_name",
    "ModuleNotFoundError": "import no_such_module",
    "AssertionError": "assert torch.__version__ == '0.4', 'a wrong version'",
    "NameError": "undefined",
    "ValueError": "raise ValueError('a wrong option')",
    "RuntimeError": "raise RuntimeError('a wrong version')",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_nothing_is_printed_after_the_traceback(tmp_path: Path, kind: str) -> None:
    finished = run_script(tmp_path, TRAIN + PLAIN[kind] + "\n")

    assert finished.returncode == 1
    assert "error[" not in finished.stderr
    assert "torchmedic:" not in finished.stderr
    assert finished.stderr.splitlines()[-1].startswith(kind)
    assert finished.only.code == "TM900"
    assert finished.report.outcome.symptom == "exception"


def test_what_torch_refuses_is_printed(tmp_path: Path) -> None:
    finished = run_script(tmp_path, TRAIN + "torch.rand(4, 3).view(torch.float64)\n")

    assert finished.only.code == "TM900"
    assert "error[TM900]" in finished.stderr
