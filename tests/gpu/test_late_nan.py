"""Gradients that are not finite, on the card: the step that made them is found one step later, with its own batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from late_cases import CASES, LateCase
from running import marked_line, torchmedic

pytestmark = pytest.mark.gpu

# Replayed with the weights of that step or stand-ins, the weights must afterwards be what they were: bad.
RESTORED = """
import hashlib
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x = torch.randn(4, 8, device="cuda")
    if step == 7:
        x[2] = 0
    optimizer.zero_grad()
    (model(x).square().sum(-1).sqrt() - 1).abs().mean().backward()
    optimizer.step()
    print(step, hashlib.sha256(model.weight.detach().cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_step_before_is_blamed(tmp_path: Path, case: LateCase) -> None:
    source = case.script("cuda")
    (tmp_path / "train.py").write_text(source)
    finished = torchmedic(tmp_path, "train.py")

    diagnosis = finished.only
    assert diagnosis.code == case.code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert case.says in " ".join([*diagnosis.evidence, *(str(place.label) for place in diagnosis.locations)])
    assert any("spoiled when this was noticed" in fact for fact in diagnosis.evidence), finished.stderr


def test_spoiled_weights_are_put_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESTORED)
    watched = torchmedic(tmp_path, "train.py")
    off = tmp_path / "off"
    off.mkdir()
    (off / "train.py").write_text(RESTORED)
    alone = torchmedic(off, "train.py", TORCHMEDIC_INJECT_FAULT="observe.finite")

    assert watched.only.code == "TM203", watched.stderr
    assert watched.stdout == alone.stdout


# The loss is a step of its own, and so is every copy: none may be in the graph, and no question may spoil the capture.
CAPTURED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(8, 16, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(5):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
for _ in range(5):
    graph.replay()
print(loss.item())
"""


def test_a_captured_step_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CAPTURED)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == ()
    assert "fault" not in finished.stderr


def test_the_random_state_is_noted_in_full() -> None:
    import torch

    from torchmedic.observe.step.step_notes import StepNotes

    torch.cuda.manual_seed(2**63 + 12345)
    torch.rand(1000, device="cuda")
    notes = StepNotes()
    notes.step_begins(None)
    wanted = torch.cuda.get_rng_state_all()

    assert all(torch.equal(a, b) for a, b in zip(notes.device_rng, wanted, strict=True))


NORMS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(64):
    loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    print(step, norm)
    optimizer.step()
"""


def test_the_curve_of_gradient_norms_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NORMS)
    finished = torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0, finished.stderr
    wanted = {int(step): float(norm) for step, norm in map(str.split, finished.stdout.splitlines())}
    (events,) = finished.run.glob("*/events.jsonl")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    points = [point for line in lines if line["kind"] == "curves" for point in line["points"]]
    norms = {point[0]: point[3] for point in points if point[3] is not None}
    assert len(norms) >= 3
    assert norms == {step: pytest.approx(wanted[step], rel=1e-3) for step in norms}
