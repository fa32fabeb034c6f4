"""Failures of the autograd graph, in many shapes of training script, are diagnosed at the line to change.

The scripts are in autograd_cases/*.txt. `=== name CODE` begins one; `cured` behind the code says that a treatment must
have been proven on the step, `slow` that `make test` leaves it out; `--- file.py` begins another file of the same
script. The line to blame ends in `# <- cause`, other lines that must be named in `# <- also`. The code `none` stands
for a healthy script.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from running import run_script

FOLDER = Path(__file__).parent / "autograd_cases"


class Case(NamedTuple):
    name: str
    code: str
    cured: bool
    files: dict[str, str]

    def marked(self, mark: str) -> set[tuple[str, int]]:
        return {
            (file, number)
            for file, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if line.endswith(f"# <- {mark}")
        }


def cases(*, healthy: bool) -> list[object]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        _, *parts = re.split(r"^=== ", path.read_text(), flags=re.M)
        for part in parts:
            head, _, body = part.partition("\n")
            name, code, *rest = head.split()
            main, *others = re.split(r"^--- ", body, flags=re.M)
            files = {"train.py": main} | {text.split("\n", 1)[0]: text.split("\n", 1)[1] for text in others}
            if (code == "none") == healthy:
                marks = [pytest.mark.slow] if "slow" in rest else []
                case = Case(name, code, "cured" in rest, files)
                found.append(pytest.param(case, id=f"{path.stem}-{name}", marks=marks))
    return found


def write(folder: Path, case: Case) -> str:
    for name, text in case.files.items():
        (folder / name).write_text(text)
    return case.files["train.py"]


@pytest.mark.parametrize("case", cases(healthy=False))
def test_the_cause_is_named_at_its_line(tmp_path: Path, case: Case) -> None:
    finished = run_script(tmp_path, write(tmp_path, case))

    diagnosis = finished.only
    assert diagnosis.code == case.code, finished.stderr
    place = diagnosis.cause_location
    assert place is not None
    assert (place.file, place.line) in case.marked("cause"), finished.stderr
    assert case.marked("also") <= {(other.file, other.line) for other in diagnosis.locations}, finished.stderr
    proven = [treatment for treatment in diagnosis.treatments if treatment.proven]
    assert bool(proven) == case.cured, finished.stderr
    for treatment in proven:
        assert "all gradients finite" in treatment.result
    assert "a fault of its own" not in finished.stderr


@pytest.mark.parametrize("case", cases(healthy=True))
def test_a_healthy_script_is_told_nothing(tmp_path: Path, case: Case) -> None:
    finished = run_script(tmp_path, write(tmp_path, case))

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == ()


CARRIED = """
import torch
from torch import nn
class Runner:
    def __init__(self):
        self.rnn, self.state = nn.GRU(4, 8), None
        self.optimizer = torch.optim.SGD(self.rnn.parameters(), lr=0.1)
    def step(self, x):
        out, self.state = self.rnn(x, self.state)
        loss = out.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
runner = Runner()
for _ in range(4):
    runner.step(torch.randn(3, 2, 4))
"""
CARRIED_INTO_A_LOOP = """
import torch
from torch import nn
class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.GRUCell(4, 8), None
    def forward(self, frames):
        h = self.state if self.state is not None else frames.new_zeros(2, 8)
        seen = []
        for frame in frames:
            h = self.cell(frame, h)
            seen.append(h)
        self.state = h
        return torch.stack(seen)
tracker = Tracker()
optimizer = torch.optim.SGD(tracker.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    tracker(torch.randn(3, 2, 4)).square().mean().backward()
    optimizer.step()
"""
PAIR_INTO_A_LOOP = """
import torch
from torch import nn
class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.LSTMCell(4, 8), None
    def forward(self, frames):
        h, c = self.state or (frames.new_zeros(2, 8), frames.new_zeros(2, 8))
        seen = []
        for frame in frames:
            h, c = self.cell(frame, (h, c))
            seen.append(h)
        self.state = (h, c)
        return torch.stack(seen)
tracker = Tracker()
optimizer = torch.optim.SGD(tracker.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    tracker(torch.randn(3, 2, 4)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        pytest.param(CARRIED, "None if self.state is None else self.state.detach())", id="given to a layer"),
        pytest.param(
            CARRIED_INTO_A_LOOP,
            "self.state = h.detach()",
            id="not cut in each turn of a loop",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            PAIR_INTO_A_LOOP,
            "tuple(part.detach() for part in self.state)",
            id="a pair that a loop changes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_cure_of_a_carried_state_is_fit_for_the_first_step(tmp_path: Path, source: str, line: str) -> None:
    failed = run_script(tmp_path, source).only
    (cure,) = [treatment for treatment in failed.treatments if treatment.proven]
    old, new = (line[1:] for line in cure.patch.splitlines() if line[:2] in ("- ", "+ "))
    assert line in new
    again = tmp_path / "again"
    again.mkdir()
    cured = run_script(again, source.replace(old, new))
    assert cured.returncode == 0, new
    assert cured.report.diagnoses == ()
