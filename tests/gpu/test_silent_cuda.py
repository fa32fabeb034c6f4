"""Mistakes of the loop on a real card: found without waiting for it, and the well-known snippets that need one."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, torchmedic

pytestmark = pytest.mark.gpu

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)), nn.Linear(1024, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")


def batch():
    return torch.randn(2048, 1024, device="cuda"), torch.randn(2048, 1, device="cuda")

"""

FAILING = {
    "gradients never cleared": (
        "TM601",
        """
for step in range(40):
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()  # <- cause
""",
    ),
    "gradients cleared inside of the cycle": (
        "TM602",
        """
for step in range(40):
    optimizer.zero_grad()  # <- cause
    x, y = batch()
    (nn.functional.mse_loss(model(x), y) / 4).backward()
    if step % 4 == 3:
        optimizer.step()
""",
    ),
    "gradients cleared before the update": (
        "TM604",
        """
for step in range(20):
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # <- cause
    optimizer.step()
""",
    ),
    "clipped before unscaling": (
        "TM606",
        """
for step in range(20):
    optimizer.zero_grad()
    x, y = batch()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- cause
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    "memory given back in every step": (
        "TM617",
        """
for step in range(30):
    with torch.no_grad():
        x, y = batch()
    optimizer.zero_grad()
    outputs = model(x)
    loss = nn.functional.mse_loss(outputs, y)
    loss.backward()
    optimizer.step()
    del x, y, outputs, loss
    torch.cuda.empty_cache()  # <- cause
""",
    ),
}

HEALTHY = {
    "cleared by hand, out of sight": """
for step in range(40):
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.data.zero_()
""",
    "synchronize, evaluation in the loop, accumulation": """
for step in range(40):
    x, y = batch()
    with torch.no_grad():
        model(x)
    (nn.functional.mse_loss(model(x), y) / 4).backward()
    torch.cuda.synchronize()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
""",
    "autocast around the whole loop": """
with torch.autocast("cuda", dtype=torch.float16):
    for step in range(40):
        optimizer.zero_grad()
        x, y = batch()
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
""",
    "a captured graph": """
static, goal = batch()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(static), goal).backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    nn.functional.mse_loss(model(static), goal).backward()
    optimizer.step()
for _ in range(20):
    graph.replay()
torch.cuda.synchronize()
""",
}


@pytest.mark.parametrize(("code", "source"), FAILING.values(), ids=FAILING.keys())
def test_the_mistake_is_found_on_the_card(tmp_path: Path, code: str, source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert finished.only.code == code, finished.stderr
    assert finished.only.cause_location is not None
    assert finished.only.cause_location.line == marked_line(HEAD + source), finished.stderr


@pytest.mark.parametrize("source", HEALTHY.values(), ids=HEALTHY.keys())
def test_nothing_is_found_in_a_healthy_loop_on_the_card(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert all(found.severity == "note" for found in finished.report.diagnoses), finished.stderr
