"""A default device is a mode of torch: it changes nothing in a diagnosis."""

from __future__ import annotations

from pathlib import Path

from running import run_script

SCRIPT = """
import sys

import torch
import torch.nn.functional as F
from torch import nn

if sys.argv[1] == "device":
    torch.set_default_device("cpu")
torch.manual_seed(0)
table = nn.Embedding(10, 8)
head = nn.Linear(8, 3)
optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    ids = torch.randint(0, 10, (4, 5)) + 3 * (step == 2)
    hidden = table.weight[ids].mean(1)
    loss = F.cross_entropy(head(hidden), torch.randint(0, 3, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_same_diagnosis_with_a_default_device(tmp_path: Path) -> None:
    found = []
    for way in ("none", "device"):
        folder = tmp_path / way
        folder.mkdir()
        found.append(run_script(folder, SCRIPT, way).only)
    plain, device = found
    assert plain.code == "TM302"
    assert plain.grade == "proven"
    assert (device.code, device.grade, device.message) == (plain.code, plain.grade, plain.message)
    assert device.evidence == plain.evidence
    assert device.locations == plain.locations
