"""A gradient that is not finite, on a device that is read late: the step that made it is found a step later.

There is no such device here, so the scripts have the CPU treated as one (`late_cpu`). `tests/gpu` runs them on a card.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from late_cases import CASES, LateCase
from running import marked_line, run_script

HELPER = Path(__file__).parents[1] / "late_cpu.py"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_step_before_is_blamed(tmp_path: Path, case: LateCase) -> None:
    shutil.copy(HELPER, tmp_path)
    source = case.script("cpu")
    finished = run_script(tmp_path, source)

    diagnosis = finished.only
    assert diagnosis.code == case.code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert case.says in " ".join([*diagnosis.evidence, *(str(place.label) for place in diagnosis.locations)])
    assert any("spoiled when this was noticed" in fact for fact in diagnosis.evidence), finished.stderr


HEALTHY = """
import hashlib
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(70, 8), torch.randn(70, 1)), batch_size=6, shuffle=True)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
print(digest.hexdigest())
"""


def test_healthy_training_is_not_changed(tmp_path: Path) -> None:
    shutil.copy(HELPER, tmp_path)
    late = run_script(tmp_path, "import late_cpu" + HEALTHY)
    other = tmp_path / "other"
    other.mkdir()
    plain = run_script(other, HEALTHY)

    assert late.stdout == plain.stdout != ""
    assert late.report.diagnoses == ()
    assert late.stderr == ""
    norms, wanted = _norms(late.run), _norms(plain.run)
    assert len(norms) >= 3  # at every eighth step at most, and the last one may still be under way
    assert norms == {step: pytest.approx(wanted[step], rel=1e-4) for step in norms}


def _norms(run: Path) -> dict[int, float]:
    """The recorded gradient norms, by step."""
    (events,) = run.glob("*/events.jsonl")
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    points = [point for line in lines if line["kind"] == "curves" for point in line["points"]]
    return {point[0]: point[3] for point in points if point[3] is not None}


SPOILED = """
import hashlib
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x = torch.randn(4, 8)
    if step == 7:
        x[2] = 0
    optimizer.zero_grad()
    (model(x).square().sum(-1).sqrt() - 1).abs().mean().backward()
    optimizer.step()
    print(step, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_spoiled_weights_are_put_back_as_they_were(tmp_path: Path) -> None:
    shutil.copy(HELPER, tmp_path)
    watched = run_script(tmp_path, "import late_cpu" + SPOILED)
    other = tmp_path / "other"
    other.mkdir()
    unwatched = run_script(other, SPOILED, TORCHMEDIC_INJECT_FAULT="observe.finite")

    assert watched.only.code == "TM203"
    assert watched.only.step == 7
    assert watched.stdout == unwatched.stdout
