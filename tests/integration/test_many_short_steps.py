"""Runs of many very short steps, of which most are not noted in full: what goes wrong late is found all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Finished, marked_line, run_script

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{late}
torch.manual_seed(0)
inputs, labels = torch.randn(5600, 6), torch.randint(0, 3, (5600,))
BAD = 4477


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        {forward}
        return self.b(h)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{damage}
for x, y in DataLoader(TensorDataset(inputs, labels), batch_size=8):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""

DIVIDED = "h = h / x.norm(dim=-1, keepdim=True)  # <- cause"


def run(folder: Path, *, forward: str = "pass", damage: str = "", late: bool = False) -> tuple[Finished, str]:
    source = LOOP.format(forward=forward, damage=damage, late="import late_cpu" if late else "")
    (folder / "late_cpu.py").write_text((Path(__file__).parent.parent / "late_cpu.py").read_text())
    return run_script(folder, source), source


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_a_healthy_run_is_counted_right(tmp_path: Path, late: bool) -> None:
    finished, _ = run(tmp_path, late=late)

    assert finished.report.diagnoses == ()
    assert finished.report.outcome.steps == 700
    assert "fault" not in (finished.run / "rank0" / "events.jsonl").read_text()


@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_a_bad_loss_is_traced_to_its_item(tmp_path: Path, late: bool) -> None:
    finished, source = run(tmp_path, forward=DIVIDED, damage="inputs[BAD] = 0", late=late)

    diagnosis = finished.only
    assert diagnosis.code == "TM201", finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert "4477" in finished.stderr, finished.stderr


def test_an_exception_is_explained(tmp_path: Path) -> None:
    finished, _ = run(tmp_path, damage="labels[BAD] = 3")

    diagnosis = finished.only
    assert diagnosis.code == "TM301", finished.stderr
    assert "dataset item 4477" in diagnosis.cause
    assert diagnosis.step == 4477 // 8
    assert finished.report.outcome.steps == 4477 // 8


def test_a_bad_gradient_or_rate_is_found_before_the_weights_are_touched(tmp_path: Path) -> None:
    loop = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(520):
    optimizer.zero_grad()
    {loss}.backward()
    {spoil}
    optimizer.step()
"""
    root = "(model(torch.randn(8, 4)).square().sum(-1) * (step != 477)).sqrt().mean()"
    rate = 'optimizer.param_groups[0]["lr"] /= float(step != 477) or float("nan")'
    for name, code, loss, spoil in (("gradient", "TM203", root, "pass"), ("rate", "TM298", "model.weight.sum()", rate)):
        (tmp_path / name).mkdir()
        finished = run_script(tmp_path / name, loop.format(loss=loss, spoil=spoil))

        assert (finished.only.code, finished.only.step) == (code, 477), finished.stderr


def test_a_validation_in_the_middle_is_no_mistake(tmp_path: Path) -> None:
    """It wakes the ledger of the loop in a step of which little is noted."""
    finished = run_script(
        tmp_path,
        """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))


def validate():
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


for step in range(620):
    optimizer.zero_grad()
    if step % 97 == 90:
        validate()
    loss = nn.functional.cross_entropy(model(x), y)
    if step % 97 == 93:
        validate()
    loss.backward()
    if step % 97 == 95:
        validate()
    optimizer.step()
""",
    )

    assert finished.report.diagnoses == (), finished.stderr
    assert finished.report.outcome.steps == 620


STRETCHES = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmedic.observe import lifecycle
from torchmedic.observe.hooks import current_step

# However busy the machine is
current_step._MAX_SHORT_SECONDS = current_step._MAX_STILL_SHORT_SECONDS = current_step._MIN_LONG_SECONDS = 1e9
current_step._SECONDS_BETWEEN_FULL = 1e9
agent = lifecycle.current()
torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
fast, items = 0, []
for step, (x, y) in enumerate(DataLoader(TensorDataset(torch.ones(1200, 6), torch.ones(1200, 3)), batch_size=2)):
    fast += agent.step.fast.on
    items.append(agent.batches.indices)
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    SPOIL
    optimizer.step()
print(json.dumps([fast, items, agent.clock.step, agent.finite.steps, agent.batches.number + 1]))
"""


def test_fast_steps_are_accounted_for(tmp_path: Path) -> None:
    finished = run_script(tmp_path, STRETCHES.replace("SPOIL", "pass"))

    fast, items, *counts = json.loads(finished.stdout)
    assert fast > 250  # of the 299 steps that are short ones
    assert counts == [600, 600, 600]
    assert items == [[2 * step, 2 * step + 1] for step in range(600)]
    events = map(json.loads, (finished.run / "rank0" / "events.jsonl").read_text().splitlines())
    points = [point for event in events if event["kind"] == "curves" for point in event["points"]]
    assert [point[0] for point in points if point[1] is not None] == list(range(600))


def test_a_fault_in_a_fast_step_is_contained(tmp_path: Path) -> None:
    spoil = "agent.finite.losses.glances._floor = None if step == 500 else agent.finite.losses.glances._floor"
    finished = run_script(tmp_path, STRETCHES.replace("SPOIL", spoil))

    fast, _, steps, *_ = json.loads(finished.stdout)
    assert (finished.report.outcome.exit_status, steps) == (0, 600)
    assert 100 < fast <= 200  # none after the fault in step 500
    assert "a fault of its own in observe.finite was contained" in finished.stderr


LOADERS = """
import gc, json, weakref
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmedic.observe import lifecycle
from torchmedic.observe.hooks import current_step

current_step._MAX_SHORT_SECONDS = current_step._MAX_STILL_SHORT_SECONDS = current_step._MIN_LONG_SECONDS = 1e9
current_step._SECONDS_BETWEEN_FULL = 1e9
agent = lifecycle.current()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Items(Dataset):
    def __init__(self, size, bad=()):
        self.size, self.bad, self.at_error = size, bad, []

    def __len__(self):
        return self.size

    def __getitem__(self, place):
        if place in self.bad:
            self.at_error.append([agent.batches.indices, len(agent.batches.tensors())])
            raise ValueError(place)
        if INNER and place % 150 == 9:
            list(DataLoader(Items(3), batch_size=1))
        return torch.ones(1) * place / self.size


def batches(loader):
    iterator, gone, quick = iter(loader), [], 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except ValueError:
            continue
        yield batch
        gone.append(weakref.ref(batch))
        del batch
        quick = quick + 1 if agent.step.fast.on else 0
        assert BAD or BOTH or quick < 4 or gone[-2]() is None, "a batch lives on"  # the loop may hold the last one
    known = weakref.ref(iterator)
    del iterator
    assert BAD or BOTH or known() is None, "the iterator lives on"  # `zip` and a traceback hold on to what they had


gc.disable()
first, second = Items(1600, BAD), Items(1600)
fast, items = 0, []
loaders = [DataLoader(each, batch_size=2, num_workers=WORKERS) for each in (first, second)]
source = zip(*map(batches, loaders)) if BOTH else ((each,) for each in batches(loaders[0]))
for step, given in enumerate(source):
    fast += agent.step.fast.on
    items.append([agent.batches.indices, [round(float(each) * 1600) for each in given[-1]]])
    optimizer.zero_grad()
    loss = (model(given[0]) - given[-1]).square().mean()
    loss.backward()
    optimizer.step()
    del given, loss
print(json.dumps([fast, items, first.at_error]))
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("bad", "both", "inner"), [((), 0, 0), ((1001, 1400), 0, 0), ((), 1, 0), ((), 0, 1)])
def test_the_items_of_a_batch_are_known_in_fast_steps(
    tmp_path: Path, workers: int, bad: tuple[int, ...], both: int, inner: int
) -> None:
    names = {"BAD": bad, "BOTH": both, "INNER": inner, "WORKERS": workers}
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    finished = run_script(tmp_path, given + LOADERS)

    assert finished.returncode == 0, finished.stderr
    fast, items, at_error = json.loads(finished.stdout)
    assert fast > 250
    # Nothing is claimed of a batch in whose making another one came.
    assert all(drawn == held or (inner and drawn is None) for drawn, held in items)
    assert len(items) == 800 - len(bad)
    assert at_error == ([] if workers else [[None, 0]] * len(bad))  # nothing is claimed of a batch that has not come
    assert finished.report.diagnoses == ()
