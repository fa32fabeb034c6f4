"""The promises and the replay on a real card. Each script is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment, marked_line, torchmedic

pytestmark = pytest.mark.gpu

TRAINING = """
import hashlib
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
SYNC = False
for step in range(30):
    x = torch.randn(32, 64, device="cuda")
    if step == 5 and SYNC:
        torch.cuda.set_sync_debug_mode("error")
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
digest = hashlib.sha256()
for tensor in [*losses, *model.parameters()]:
    digest.update(tensor.detach().cpu().numpy().tobytes())
print(digest.hexdigest())
"""

FAILURES = {
    "division": (
        "TM201",
        """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return h / x.norm(dim=-1, keepdim=True)  # <- cause


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(12):
    x = torch.randn(16, 8, device="cuda")
    if step == 7:
        x[3] = 0
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
""",
    ),
    "in place": (
        "TM102",
        """
import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    h = torch.sigmoid(model(torch.randn(4, 8, device="cuda")))
    h *= 2  # <- cause
    loss = h.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "no graph": (
        "TM103",
        """
import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    out = model(torch.randn(4, 8, device="cuda"))
    best = out.argmax(-1)  # <- cause
    loss = best.float().mean()
    loss.backward()
    optimizer.step()
""",
    ),
    "hidden state": (
        "TM104",
        """
import torch
from torch import nn

rnn = nn.GRU(4, 8).cuda()
optimizer = torch.optim.Adam(rnn.parameters())


def train():
    h = torch.zeros(1, 2, 8, device="cuda")
    for step in range(5):
        out, h = rnn(torch.randn(3, 2, 4, device="cuda"), h)  # <- cause
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
""",
    ),
    "device mismatch": (
        "TM310",
        """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.scale = torch.ones(8)  # <- cause

    def forward(self, x):
        return self.a(x) * self.scale


model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 8, device="cuda")).mean()
    loss.backward()
    optimizer.step()
""",
    ),
    "shape mismatch": (
        "TM151",
        """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(7, 1)).cuda()  # <- cause
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 8, device="cuda")).mean()
    loss.backward()
    optimizer.step()
""",
    ),
}


def plain(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "plain.py").write_text(source)
    return subprocess.run(
        [sys.executable, "plain.py"], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=100
    )


def test_training_is_bit_identical(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    watched = torchmedic(tmp_path, "train.py")
    alone = plain(tmp_path, TRAINING)

    assert watched.returncode == alone.returncode == 0, watched.stderr + alone.stderr
    assert watched.stdout == alone.stdout
    assert watched.report.diagnoses == ()
    assert watched.report.outcome.steps == 30


def test_nothing_of_ours_waits_for_the_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace("SYNC = False", "SYNC = True"))
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    events = [json.loads(line) for line in (finished.run / "rank0" / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["kind"] == "fault"]


@pytest.mark.parametrize(("code", "source"), FAILURES.values(), ids=FAILURES.keys())
def test_failures_are_traced_on_the_card(tmp_path: Path, code: str, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    finished = torchmedic(tmp_path, "train.py")

    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
