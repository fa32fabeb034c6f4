"""The check-up of the first steps on the card: the same findings, the same bits, and no wait in later steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import plainly
from running import marked_line, torchmedic

pytestmark = pytest.mark.gpu

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
torch.set_default_device("cuda")
"""

FAILING = {
    "softmax": (
        "TM633",
        """
m = nn.Linear(4, 3); opt = torch.optim.Adam(m.parameters())
for step in range(5):
    p = m(torch.randn(8, 4)).softmax(1)  # <- cause
    opt.zero_grad(); F.cross_entropy(p, torch.randint(0, 3, (8,))).backward(); opt.step()
""",
    ),
    "range": (
        "TM634",
        """
m = nn.Linear(4, 1); opt = torch.optim.Adam(m.parameters())
for step in range(5):
    out = m(torch.randn(64, 4)).relu()  # <- cause
    opt.zero_grad(); F.mse_loss(out, torch.randn(64, 1)).backward(); opt.step()
""",
    ),
    "clamp": (
        "TM635",
        """
m = nn.Linear(4, 1); opt = torch.optim.Adam(m.parameters())
for step in range(5):
    out = (m(torch.randn(64, 4)) - 50).clamp(min=1e-6)  # <- cause
    opt.zero_grad(); out.log().mean().backward(); opt.step()
""",
    ),
    "dead": (
        "TM636",
        """
m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))  # <- cause
nn.init.constant_(m[0].bias, -100); opt = torch.optim.SGD(m.parameters(), lr=0.01)
for step in range(8):
    opt.zero_grad(); F.mse_loss(m(torch.randn(64, 4)), torch.randn(64, 1)).backward(); opt.step()
""",
    ),
    "detach": (
        "TM631",
        """
a, b = nn.Linear(4, 4), nn.Linear(4, 1); opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.01)
for step in range(8):
    out = b(a(torch.randn(64, 4)).detach())  # <- cause
    opt.zero_grad(); F.mse_loss(out, torch.randn(64, 1)).backward(); opt.step()
""",
    ),
}


@pytest.mark.parametrize(("code", "source"), FAILING.values(), ids=FAILING.keys())
def test_the_mistake_is_named_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    (tmp_path / "train.py").write_text(HEAD + source)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert finished.only.code == code, finished.stderr
    assert finished.only.cause_location is not None
    assert finished.only.cause_location.line == marked_line(HEAD + source), finished.stderr


# From the third step on, torch itself raises at anything that waits for the device.
TWICE = (
    HEAD
    + """
m = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
opt = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)  # Adam counts its steps on the default device
losses = []
for step in range(12):
    if step == 3:
        torch.cuda.set_sync_debug_mode("error")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(m(torch.randn(16, 32)), torch.randint(0, 10, (16,)))
    opt.zero_grad(); loss.backward(); opt.step()
    losses.append(loss.detach())
torch.cuda.set_sync_debug_mode("default")
print([loss.item().hex() for loss in losses], [p.double().sum().item().hex() for p in m.parameters()])
"""
)


def test_results_are_the_same_and_later_steps_never_wait(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWICE)
    plain, finished = plainly(tmp_path, "train.py"), torchmedic(tmp_path, "train.py")

    assert plain.status == finished.returncode == 0, plain.stderr + finished.stderr
    assert finished.stdout == plain.stdout
    assert finished.report.diagnoses == ()


CAPTURED = (
    HEAD
    + """
m = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)); opt = torch.optim.SGD(m.parameters(), lr=0.01)
x, y = torch.randn(16, 32), torch.randn(16, 1)
side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        opt.zero_grad(set_to_none=True); F.mse_loss(m(x), y).backward(); opt.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph(); opt.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = F.mse_loss(m(x), y); loss.backward(); opt.step()
for _ in range(5):
    graph.replay()
print(loss.item().hex())
"""
)


def test_the_capture_of_a_graph_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CAPTURED)
    plain, finished = plainly(tmp_path, "train.py"), torchmedic(tmp_path, "train.py")

    assert plain.status == finished.returncode == 0, plain.stderr + finished.stderr
    assert finished.stdout == plain.stdout
