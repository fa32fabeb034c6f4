"""What a wait for the card costs, measured on the card; and the well-known snippets that are about waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import plainly
from running import marked_line, torchmedic

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

HEAD = """
import time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)), nn.Linear(2048, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
criterion = nn.MSELoss()


def batch():
    return torch.randn(4096, 2048, device="cuda"), torch.randn(4096, 1, device="cuda")

"""

# Some milliseconds of a step of about ten are lost beyond doubt.
COSTLY = {
    "synchronize": """
for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()  # <- cause
    time.sleep(0.004)
""",
    "item in a helper": """
def log(value):
    return value.item()  # <- cause

for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    log(loss)
    time.sleep(0.004)
""",
    "a question in every step": """
for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    if loss > 1e9:  # <- cause
        break
    time.sleep(0.004)
    optimizer.step()
""",
    "a detour over the CPU": """
for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    out = model(x)
    host = out.cpu()  # <- cause
    time.sleep(0.004)
    loss = criterion(host.cuda(), y)
    loss.backward()
    optimizer.step()
""",
}

HEALTHY = {
    "seed 1: no synchronize": """
for step in range(130):
    x, y = batch()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "the loss is read now and then": """
for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(loss.item())
        time.sleep(0.004)
""",
    "a long step whose loss is read": """
for step in range(90):
    x, y = torch.randn(8192, 2048, device="cuda"), torch.randn(8192, 1, device="cuda")
    optimizer.zero_grad()
    for _ in range(4):
        (criterion(model(x), y) / 4).backward()
    optimizer.step()
    loss = criterion(model(x[:8]), y[:8]).item()
""",
}

# What is found depends on the card; only the line that may be told of is certain.
SEEDS = {
    "seed 2": (
        {"TM619"},
        """
for step in range(130):
    x, y = batch()
    loss = criterion(model(x), y)
    loss.backward()
    torch.cuda.synchronize()  # <- cause
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "seed 3": (
        {"TM619"},
        """
for step in range(130):
    x, y = batch()
    with torch.no_grad():
        model(x)
    loss = criterion(model(x), y)
    loss.backward()
    torch.cuda.synchronize()  # <- cause
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "seed 7": (
        {"TM617"},
        """
for step in range(60):
    with torch.no_grad():
        inputs, labels = torch.randn(4096, 2048).to("cuda"), torch.randn(4096, 1).to("cuda")
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, labels)
    loss.backward()
    optimizer.step()
    del inputs, labels, outputs, loss
    torch.cuda.empty_cache()  # <- cause
""",
    ),
    "seed 8": (
        {"TM617"},
        """
for step in range(130):
    x, y = batch()
    loss = criterion(model(x), y) / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
        del x, y, loss
        torch.cuda.empty_cache()  # <- cause
""",
    ),
    "seed 12": (
        {"TM619"},
        """
for step in range(130):
    x, y = batch()
    optimizer.zero_grad()
    out = model(x)
    mean = out.cpu().mean().cuda()  # <- cause
    (criterion(out, y) + mean).backward()
    optimizer.step()
""",
    ),
}


@pytest.mark.parametrize("source", COSTLY.values(), ids=COSTLY.keys())
def test_a_costly_wait_is_found_at_its_line(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert finished.only.code == "TM619", finished.stderr
    assert finished.only.cause_location is not None
    assert finished.only.cause_location.line == marked_line(HEAD + source), finished.stderr


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY.keys())
def test_what_costs_nothing_is_not_told_of(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == (), finished.stderr


@pytest.mark.parametrize(("codes", "source"), SEEDS.values(), ids=SEEDS.keys())
def test_the_well_known_snippets(tmp_path: Path, codes: set[str], source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    told = [found for found in finished.report.diagnoses if found.severity != "note"]
    assert {found.code for found in told} <= codes, finished.stderr
    lines = {found.cause_location.line for found in told if found.cause_location is not None}
    assert lines <= {marked_line(HEAD + source)}, finished.stderr


# Nothing of the measurement may add a wait or change a bit; torch itself raises at what waits.
WATCHED = (
    HEAD
    + """
losses = []
for step in range(120):
    x, y = batch()
    optimizer.zero_grad()
    if step == 60:
        torch.cuda.set_sync_debug_mode("error")
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("default")
print([loss.item().hex() for loss in losses[::7]], model[0].weight.double().sum().item().hex())
print("item" in torch.Tensor.__dict__, torch.cuda.synchronize.__module__)
"""
)


def test_the_measurement_waits_for_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WATCHED)
    plain, finished = plainly(tmp_path, "train.py"), torchmedic(tmp_path, "train.py")

    assert plain.status == finished.returncode == 0, plain.stderr + finished.stderr
    assert finished.stdout == plain.stdout
    assert "a fault of its own" not in finished.stderr
