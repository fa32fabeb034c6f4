"""`torchmedic watch`: run folders in every state, the view in a terminal, and its end."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import clean_environment

from torchmedic.cli import main
from torchmedic.observe.step import blackbox
from torchmedic.observe.step.blackbox import FileBox
from torchmedic.records import Diagnosis, Location, Outcome, Report
from torchmedic.records.gpu import GpuHealth, GpuState, Xid
from torchmedic.runfolder import confidential, files, gpu, ring
from torchmedic.supervise.watching import Watch, find_run, lives

NOBODY = 1 << 30  # the number of no process
FOUND = Diagnosis(
    code="TM201",
    name="division-by-zero",
    grade="proven",
    message="division by zero made the loss NaN",
    cause="0 / 0",
    locations=(Location(role="cause", file="model.py", line=9, column=4),),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def box(run: Path, name: str, *, pid: int | None = None, ago: float = 0.0, steps: int = 20) -> FileBox:
    """The black box of a process that has made two steps a second until some seconds ago."""
    folder = run / name
    folder.mkdir()
    written = FileBox(folder / files.BLACK_BOX)
    with pytest.MonkeyPatch.context() as patch:
        for step in range(steps):
            patch.setattr(blackbox, "now", lambda step=step: time.time() - ago - (steps - 1 - step) / 2)
            for phase in (1, 2, 3):
                written.write(phase, step, 0, step, "train.py", 7, 300 << 20, 3 << 30)
    if pid is not None:
        with open(folder / files.BLACK_BOX, "r+b") as file:
            file.seek(16)
            file.write(struct.pack("<Q", pid))
    return written


def test_ranks_side_by_side(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank, calls in enumerate((3, 2)):
        box(run, f"rank{rank}")
        writer = ring.Ring(run / f"rank{rank}" / ring.FILE, rank, 2)
        site = writer.enter((("train.py", 7 + rank, "main"),))
        for number in range(calls):
            writer.write(ring.described("all_reduce" if rank else "barrier", "0", (), (), None), number + 1, site)
    assert main(["watch", "run"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["rank0", "3", "barrier", "train.py:7"] in rows
    assert ["rank1", "2", "all_reduce", "train.py:8"] in rows


def test_a_run_that_goes_on(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    box(run, "rank0")
    box(run, "rank1", ago=90)
    files.write_report(run, Report(diagnoses=(FOUND, FOUND)))
    hot = GpuState(index=0, uuid="GPU-1", name="H200", ordinal=0, temperature=88, xids=(Xid(time=0.0, code=79),))
    gpu.write_gpu_health(run, GpuHealth(time=0.0, gpus=(hot, GpuState(index=1, uuid="GPU-2", name="other"))))
    view = Watch(run).look()
    assert (view.state, view.found, view.last) == ("running", 2, FOUND)
    assert [process.name for process in view.processes] == ["rank0", "rank1"]
    first, second = view.processes
    assert (first.state, first.phase, first.step, first.rate) == ("running", "backward", 19, pytest.approx(2, rel=0.01))
    assert (first.rss, first.device_memory) == (300 << 20, 3 << 30)
    assert first.quiet is not None
    assert second.quiet is not None
    assert first.quiet < 30 < second.quiet < 150

    assert main(["watch", "run"]) == 0
    said = capfd.readouterr().out
    assert "run  running" in said
    assert "backward" in said
    assert "2.0/s" in said
    assert "GPU 0 H200  88 C" in said
    assert "Xid 79" in said
    assert "other" not in said  # a card that the run does not see
    assert "last of 2 found: model.py:9:4: error[TM201]" in said
    assert "ended" not in said
    assert "\x1b" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_runs_that_are_over(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    box(run, "rank0", pid=NOBODY, ago=60)
    view = Watch(run).look()
    assert (view.state, view.processes[0].state) == ("gone", "gone")
    files.write_report(run, Report(outcome=Outcome(exit_status=137, signal="SIGKILL", steps=20)))
    assert main(["watch", "run/report.json"]) == 0
    assert "the run has ended by SIGKILL after 20 steps" in capfd.readouterr().out
    # What was written a moment ago speaks for a process whose number means nothing here, but not after the end.
    box(run, "rank1", pid=NOBODY)
    assert Watch(run).look().state == "ended"
    files.write_report(run, Report())
    assert Watch(run).look().state == "running"


def test_folders_with_little_in_them(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert Watch(run).look().state == "waiting"
    assert main(["watch", "run"]) == 0
    assert "no process has imported torch yet" in capfd.readouterr().out
    confidential.mark_confidential(run)
    whole = box(run, "rank0")
    path = run / "rank0" / files.BLACK_BOX
    whole.mark_clean_exit()
    (run / "rank1").mkdir()
    (run / "rank1" / files.BLACK_BOX).write_bytes(path.read_bytes()[:1000])
    (run / "rank2").mkdir()
    box(run, "rank3", steps=0, pid=NOBODY)
    (run / files.REPORT).write_bytes(b'{"schema"')
    (run / gpu.GPU_HEALTH).write_bytes(b"{")
    view = Watch(run).look()
    assert [process.state for process in view.processes] == ["running", "unreadable", "unreadable", "running"]
    assert (view.last, view.gpus) == (None, ())
    assert main(["watch", "run"]) == 0
    assert "unreadable" in capfd.readouterr().out


def test_which_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["watch", *words]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    assert "there is no run in .torchmedic" in refused()
    assert "nowhere is not a run folder" in refused("nowhere")
    (run / "notes.txt").write_text("mine")
    assert "run is not a run folder" in refused("run")
    assert "run/notes.txt is not a run folder" in refused("run/notes.txt")
    home = run.parent / ".torchmedic"
    for name in ("2026-01-02T000000-b", "2026-01-01T000000-a", ".hidden"):
        (home / name).mkdir(parents=True)
    assert find_run(None, run.parent).name == "2026-01-02T000000-b"


def test_another_process_with_the_same_number() -> None:
    assert lives(os.getpid(), time.time())
    assert not lives(os.getpid(), time.time() - 10**6)
    assert not lives(NOBODY, time.time())


@contextlib.contextmanager
def terminal(run: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`torchmedic watch` in a terminal of its own."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchmedic", "watch", str(run)],
        stdin=its,
        stdout=its,
        stderr=its,
        env=clean_environment(TERM="xterm"),
        start_new_session=True,
    )
    os.close(its)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str | None) -> str:
    """What is written until some words have come, or (None) until the other side is closed."""
    heard = ""
    end = time.monotonic() + 60
    while time.monotonic() < end and (wanted is None or wanted not in heard):
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # closed
            break
        if not data:
            break
        heard += data.decode("utf-8", "replace")
    return heard


def test_ctrl_c_in_a_terminal(run: Path) -> None:
    box(run, "rank0")
    with terminal(run) as (process, screen):
        assert "running" in read_until(screen, "rank0")
        process.send_signal(signal.SIGINT)
        rest = read_until(screen, None)
        assert process.wait(30) == 130
    assert "Traceback" not in rest
    assert "\x1b[?25h" in rest  # the cursor is back


def test_the_view_ends_with_the_run(run: Path) -> None:
    old = box(run, "rank0", pid=NOBODY)
    with terminal(run) as (process, screen):
        read_until(screen, "rank0")
        old.mark_clean_exit()
        files.write_report(run, Report(outcome=Outcome(exit_status=1, steps=1204), diagnoses=(FOUND,)))
        rest = read_until(screen, None)
        assert process.wait(30) == 0
    assert "the run has ended with status 1 after 1204 steps" in rest
    assert "TM201" in rest
