"""How long a run may be silent is learned from the run itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmedic.observe.step import blackbox
from torchmedic.observe.step.blackbox import FileBox
from torchmedic.observe.step.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER
from torchmedic.runfolder import questions
from torchmedic.supervise.host.watch import HostWatch
from torchmedic.supervise.stall import watch
from torchmedic.supervise.stall.progress import FIRST_STEP_SECONDS, MIN_STALL_SECONDS, Progress


class Run:
    """A run in a time of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        self.updates = 0
        monkeypatch.setattr(blackbox, "now", lambda: self.time)
        self.box = FileBox(folder / "blackbox")
        self.progress = Progress(folder / "blackbox", self.time)

    def phase(self, phase: int, seconds: float) -> None:
        self.box.write(phase, self.updates, 0, self.updates, "train.py", 1, 0, 0)
        self.time += seconds

    def step(self, seconds: float) -> None:
        for phase in (DATA, FORWARD, BACKWARD, OPTIMIZER):
            self.phase(phase, seconds / 5)
        self.updates += 1
        self.phase(OTHER, seconds / 5)
        self.progress.look()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_short_steps_have_the_least_limit_and_long_ones_five_of_them(run: Run) -> None:
    assert run.progress.limit(None) == FIRST_STEP_SECONDS
    for _ in range(50):
        run.step(0.2)
    assert run.progress.limit(None) == MIN_STALL_SECONDS
    for _ in range(100):
        run.step(10.0)
    assert 45 < run.progress.limit(None) < 55
    assert run.progress.limit(3.0) == 3.0


def test_a_long_validation_once_makes_the_next_one_no_surprise(run: Run) -> None:
    for _ in range(5):
        run.step(0.2)
    run.phase(OTHER, 100.0)
    run.step(0.2)
    assert run.progress.phase == "other"
    assert run.progress.limit(None) == pytest.approx(200, abs=1)
    run.phase(BACKWARD, 0.0)
    run.progress.look()
    assert run.progress.limit(None) == MIN_STALL_SECONDS


def test_a_forward_pass_is_progress_and_to_ask_an_empty_loader_is_none(run: Run) -> None:
    run.step(0.2)
    run.phase(OTHER, 10.0)
    run.progress.look()
    silent = run.progress.still(run.time)
    assert silent >= 10
    for _ in range(3000):  # more than the ring holds
        run.phase(DATA, 0.001)
        run.phase(OTHER, 0.001)
    assert not run.progress.look()
    assert run.progress.still(run.time) > silent
    run.phase(FORWARD, 0.1)
    assert run.progress.look()
    assert run.progress.still(run.time) == pytest.approx(0.1)
    assert run.progress.last_silence > silent


def test_a_process_that_ended_is_not_waited_for(run: Run) -> None:
    run.step(0.2)
    assert not run.progress.ended
    run.box.mark_clean_exit()
    assert run.progress.ended


def test_who_is_kept_waiting_by_us_does_not_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    (tmp_path / questions.FOLDER).mkdir()
    examined: list[int] = []

    def examine(_: Path, progress: Progress, *__: object) -> Iterator[None]:
        examined.append(progress.pid)
        yield None

    monkeypatch.setattr(watch, "examine", examine)
    monkeypatch.setattr(blackbox, "now", lambda: 1000.0)  # long ago
    FileBox(folder / "blackbox").write(FORWARD, 0, 0, 1, "train.py", 1, 0, 0)
    watching = watch.StallWatch(tmp_path, None, 1.0)

    def look() -> None:
        watching._due = 0.0
        for _ in range(2):  # what the first begins, the second goes on with
            list(watching.look(HostWatch(tmp_path)))

    busy = questions.busy(tmp_path, os.getpid())
    busy.touch()
    look()
    assert examined == []
    os.utime(busy, (1000, 1000))
    look()
    assert examined == [os.getpid()], "not for ever"
