"""Snippets that popular answers about `backward()` show, completed so that they run; most are fine as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, run_script

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
"""

HEALTHY = {
    "no synchronize after backward": """
model = nn.Linear(10, 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(50):
    loss = (model(torch.randn(16, 10, device=device)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "evaluation under no_grad inside the loop": """
model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    inputs = torch.randn(8, 10, device=device)
    with torch.no_grad():
        check = model(inputs)
    loss = (model(inputs) - check).square().mean() + model(inputs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a large network with try and except": """
model = nn.Sequential(nn.Linear(1000, 500), nn.ReLU(), nn.Linear(500, 200), nn.ReLU(), nn.Linear(200, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters())
inputs, targets = torch.randn(100, 1000, device=device), torch.randn(100, 1, device=device)
for epoch in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    try:
        loss.backward()
    except RuntimeError as error:
        print(error)
    optimizer.step()
""",
    "a forward under no_grad whose result is unused": """
model = nn.Linear(10, 1).to(device)
x = torch.randn(5, 10, device=device)
with torch.no_grad():
    unused = model(x)
model(x).mean().backward()
""",
    "gradient accumulation": """
model = nn.Linear(10, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.zero_grad()
for step in range(8):
    loss = model(torch.randn(4, 10, device=device)).square().mean() / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    "accumulation, with memory given back after every update": """
model = nn.Linear(100, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    inputs, labels = torch.randn(64, 100, device=device), torch.randn(64, 1, device=device)
    loss = nn.functional.mse_loss(model(inputs), labels) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
        del inputs, labels, loss
        if device == "cpu":
            torch.cuda.empty_cache()
""",
    "a round trip through another device": """
x = torch.randn(10, device=device, requires_grad=True)
y = x.cpu().mean().to(device)
y.backward()
""",
    "autocast around the whole loop": """
model = nn.Linear(10, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
with torch.autocast(device, dtype=torch.bfloat16):
    for step in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(8, 10, device=device)), torch.zeros(8, 1, device=device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
}

FAILING = {
    "every value clamped before the log": (
        "TM635",
        """
x = torch.randn(10, device=device, requires_grad=True) - 2
x.clamp_(min=1e-6)  # <- cause
loss = x.log().mean()
loss.backward()
""",
    ),
    "gradients cleared for every micro-batch": (
        "TM602",
        """
model = nn.Linear(10, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(16):
    inputs, labels = torch.randn(8, 10, device=device), torch.randn(8, 1, device=device)
    optimizer.zero_grad()  # <- cause
    loss = nn.functional.mse_loss(model(inputs), labels) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
""",
    ),
    "division by y - y": (
        "TM201",
        """
x = torch.randn(10, device=device, requires_grad=True)
y = torch.rand_like(x)
loss = (x / (y - y)).mean()  # <- cause
loss.backward()
""",
    ),
    "forward under no_grad": (
        "TM103",
        """
model = nn.Linear(10, 1).to(device)
criterion = nn.MSELoss()
inputs, targets = torch.randn(5, 10, device=device), torch.randn(5, 1, device=device)
with torch.no_grad():  # <- cause
    outputs = model(inputs)
loss = criterion(outputs, targets)
loss.backward()
""",
    ),
    "everything under no_grad, backward too": (
        "TM103",
        """
model = nn.Linear(10, 1).to(device)
criterion = nn.MSELoss()
inputs, targets = torch.randn(5, 10, device=device), torch.randn(5, 1, device=device)
with torch.no_grad():  # <- cause
    outputs = model(inputs)
    loss = criterion(outputs, targets)
    del outputs
    loss.backward()
""",
    ),
}


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY.keys())
def test_nothing_is_said_of_what_is_fine(tmp_path: Path, source: str) -> None:
    finished = run_script(tmp_path, HEAD + source)

    assert finished.returncode == 0, finished.stderr
    assert all(found.severity == "note" for found in finished.report.diagnoses)
    assert finished.stderr == ""


@pytest.mark.parametrize(("code", "source"), FAILING.values(), ids=FAILING.keys())
def test_the_true_cause_is_named(tmp_path: Path, code: str, source: str) -> None:
    finished = run_script(tmp_path, HEAD + source)

    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(HEAD + source), finished.stderr
