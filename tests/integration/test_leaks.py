"""Leaks while they grow: each is named by its holder and the line that fills it; what only looks like one is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import FENCE, PAGES, check_health
from running import marked_line, run_script

from torchmedic.report.frames import hunks

CASES = Path(__file__).parent / "leak_cases"
LEAKS = re.split(r"^# === (TM\d+) (.+) \| (.+)\n", (CASES / "leaks.txt").read_text(), flags=re.M)[1:]
IN_PIECES = re.split(r"^# === (.+)\n", (CASES / "leaks_in_pieces.txt").read_text(), flags=re.M)[1:]
LOOK_ALIKES = re.split(r"^# === (.+)\n", (CASES / "look_alikes.txt").read_text(), flags=re.M)[1:]


@pytest.mark.parametrize(
    ("code", "holder", "source"),
    [
        pytest.param(code, holder, source, id=f"{code} {name}")
        for code, name, holder, source in zip(LEAKS[::4], LEAKS[1::4], LEAKS[2::4], LEAKS[3::4], strict=True)
    ],
)
def test_a_leak_is_named_by_its_holder_and_the_line_that_fills_it(
    tmp_path: Path, code: str, holder: str, source: str
) -> None:
    finished = run_script(tmp_path, source)

    assert finished.returncode == 0, finished.stderr
    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert holder in diagnosis.message
    assert diagnosis.severity == "warning"
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name.replace(",", ""))
        for name, source in zip(LOOK_ALIKES[::2], LOOK_ALIKES[1::2], strict=True)
    ],
)
def test_what_only_looks_like_a_leak_is_not_told_of(tmp_path: Path, source: str) -> None:
    finished = run_script(tmp_path, source)

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == (), finished.stderr
    assert "torchmedic" not in finished.stderr


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=name.replace(",", ""))
        for name, source in zip(IN_PIECES[::2], IN_PIECES[1::2], strict=True)
    ],
)
def test_what_grows_in_pieces_is_named_by_where_it_begins(tmp_path: Path, source: str) -> None:
    lines = enumerate(source.splitlines(), 1)
    wanted = {number: found[1] for number, line in lines if (found := re.search(r"  # <- (.+)$", line))}
    finished = run_script(tmp_path, source)

    named = {
        found.cause_location.line: found.message
        for found in finished.report.diagnoses
        if found.cause_location is not None
    }
    assert named.keys() == wanted.keys(), finished.stderr
    for line, name in wanted.items():
        assert f"`{name}" in named[line]
    assert {found.code for found in finished.report.diagnoses} <= {"TM450", "TM451"}


WORKER = """
import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self):
        self.kept, self.cache = [], {}

    def __len__(self):
        return 80

    def __getitem__(self, index):
        image = torch.randn(400, 400)
        if index not in self.cache:
            self.cache[index] = image.clone()
        self.kept.append(image)  # <- cause
        return image[0, :8]


if __name__ == "__main__":
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Images(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    for epoch in range(6):
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""


def test_the_patch_for_a_total_of_losses_leaves_what_later_lines_can_read(tmp_path: Path) -> None:
    ((_, _, source),) = FENCE.findall(next(PAGES.glob("TM451-*.md")).read_text())[:1]
    (treatment,) = run_script(tmp_path, source).only.treatments
    assert "total.item()" in source
    (hunk,) = hunks(treatment.patch)
    cured = tmp_path / "cured"
    cured.mkdir()
    check_health(run_script(cured, source.replace(hunk.removed[0].text, hunk.added[0].text)))


def test_what_grows_in_a_worker_is_named_and_a_cache_there_is_not(tmp_path: Path) -> None:
    finished = run_script(tmp_path, WORKER)

    diagnosis = finished.only
    assert diagnosis.code == "TM452"
    assert "`Images.kept`" in diagnosis.message
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(WORKER)
    assert any("DataLoader worker 0, one of 2" in each for each in diagnosis.evidence)


@pytest.mark.slow
def test_a_cache_in_a_worker_whose_keys_never_come_again_is_named(tmp_path: Path) -> None:
    # The other way round: the list is emptied, and the cache is asked for another key each time.
    source = WORKER.replace("self.kept.append(image)  # <- cause", "self.kept = [image]")
    source = source.replace(
        "if index not in self.cache", "key = (index, torch.rand(()).item())\n        if key not in self.cache"
    )
    source = source.replace("self.cache[index] = image.clone()", "self.cache[key] = image.clone()  # <- cause")

    diagnosis = run_script(tmp_path, source).only

    assert (diagnosis.code, "`Images.cache`" in diagnosis.message) == ("TM452", True)
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source)


RUNS_OUT = """
import resource

import torch
from torch import nn


class Record:
    def __init__(self, out, before):
        self.out, self.before = out, before


model = nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
first = None
for step in range(1000):
    if step == 60:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), resource.RLIM_INFINITY))
    x = torch.randn(1500, 4)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    first = Record(model(x).mean(), first)  # <- cause
"""


def test_a_leak_that_was_warned_of_and_then_fills_memory_is_told_once(tmp_path: Path) -> None:
    finished = run_script(tmp_path, RUNS_OUT)

    diagnosis = finished.only
    assert (diagnosis.code, diagnosis.severity) == ("TM403", "error")
    assert "`first`" in diagnosis.message
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(RUNS_OUT)
    assert any("TM450 had warned of it at step" in each for each in diagnosis.evidence)
    assert finished.stderr.index("warning[TM450]") < finished.stderr.index("error[TM403]")


HELD = """
import gc
import weakref

import torch
from torch import nn


def train(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses, born, alive = [], [], []
    for step in range(steps):
        out = model(torch.randn(16, 8))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        born.append(weakref.ref(out))
        del out
        alive.append(sum(each() is not None for each in born))
    print(alive, [value.double().sum().item().hex() for value in model.parameters()])


train(60)
gc.collect()
print(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
"""


def test_training_is_the_same_and_no_tensor_lives_longer(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    watched = run_script(tmp_path / "one", HELD)
    alone = run_script(tmp_path / "two", HELD, TORCHMEDIC_CHECKUP="false")

    assert watched.only.code == "TM450"
    assert alone.report.diagnoses == ()
    assert watched.stdout == alone.stdout


def test_events_carry_the_memory_over_time_at_a_bounded_rate(tmp_path: Path) -> None:
    source = """
import time
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.04)
"""
    finished = run_script(tmp_path, source)

    lines = [json.loads(line) for line in (finished.run / "rank0" / "events.jsonl").read_text().splitlines()]
    series = [line for line in lines if line["kind"] == "memory"]
    assert 2 <= len(series) <= 1 + series[-1]["time"] - series[0]["time"] + 1
    assert all(line["rss"] > 1 << 24 and line["phase"] and "allocated" not in line for line in series)
    assert series[0]["step"] < series[-1]["step"]


def test_a_line_can_say_that_it_is_meant(tmp_path: Path) -> None:
    finished = run_script(tmp_path, LEAKS[3].replace("# <- cause", "# torchmedic: ignore[TM450]"))

    assert finished.report.diagnoses == ()
