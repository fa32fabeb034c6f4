"""What a script catches is no failure: neither a shown exception, nor an exit that was not taken, nor odd tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

HEAD = """
import sys, threading, traceback
import torch


def bad():
    torch.ones(3) + torch.ones(4)


caught = None
try:
    bad()
except RuntimeError as error:
    caught = error
"""
CAUGHT = {
    "printed": "traceback.print_exception(caught)",
    "shown by the hook": "sys.excepthook(type(caught), caught, caught.__traceback__)",
    "shown by the hook of threads": (
        "threading.excepthook(threading.ExceptHookArgs((type(caught), caught, caught.__traceback__, None)))"
    ),
    "an exit that was caught": (
        "try:\n    bad()\nexcept RuntimeError:\n    try:\n        sys.exit(1)\n    except SystemExit:\n        pass"
    ),
    "an exit of a thread": (
        "def leave():\n    try:\n        bad()\n    except RuntimeError:\n        sys.exit(1)\n"
        "thread = threading.Thread(target=leave)\nthread.start()\nthread.join()"
    ),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_caught_exception_is_no_finding(tmp_path: Path, name: str) -> None:
    finished = run_script(tmp_path, HEAD + CAUGHT[name] + "\n")

    assert finished.returncode == 0
    assert finished.report.diagnoses == ()
    assert "error[" not in finished.stderr


def test_an_exit_because_of_an_exception_is_one(tmp_path: Path) -> None:
    finished = run_script(tmp_path, HEAD + "try:\n    bad()\nexcept RuntimeError:\n    sys.exit(1)\n")

    assert (finished.returncode, finished.only.code) == (1, "TM153")


SHAPES_ONLY = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def train(steps):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


with FakeTensorMode():
    train(20)
with torch.device("meta"):
    train(20)
model = train(20)
with FakeTensorMode(allow_non_fake_inputs=True):
    model(torch.randn(2, 4)).mean().backward()
train(20)
print("trained")
"""


def test_tensors_that_have_only_a_shape(tmp_path: Path) -> None:
    finished = run_script(tmp_path, SHAPES_ONLY)

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "trained\n", "")
