"""What becomes of a run that stands still: left alone, killed or saved as the user wants, and nothing is left over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from hanging import run_each
from processes import awaited
from running import clean_environment
from zygote import Zygote

from torchmedic.records import Report

RESUMES = """
import ctypes
import os
import signal
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 10:
        signal.signal(signal.SIGALRM, lambda *_: None)
        open("pid", "w").write(str(os.getpid()))
        ctypes.CDLL(None).pause()
"""

SAVED = """
import ctypes
import os
import signal
import torch
from torch import nn

torch.manual_seed(0)
unfinished = nn.Linear.__new__(nn.Linear)  # as a constructor leaves it that has failed
model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 3:
        torch.save(model.state_dict(), "mine.pt")
        signal.signal(signal.SIGALRM, lambda *_: None)
        open("pid", "w").write(str(os.getpid()))
        ctypes.CDLL(None).pause()
"""

REFUSED = """
import ctypes
import os
import signal
import torch
from torch import nn


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if hasattr(self, "late"):
            signal.signal(signal.SIGALRM, lambda *_: None)
            open("pid", "w").write(str(os.getpid()))
            ctypes.CDLL(None).pause()
        self.late = True


model = nn.Linear(4, 1)
optimizer = Slow(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.timeout(200)
def test_a_run_that_goes_on_is_reported_again_and_one_that_does_not_is_saved(tmp_path: Path) -> None:
    import torch

    scripts = {
        "resumes": (RESUMES, ()),
        "confidential": (RESUMES, ("--confidential",)),
        "saved": (SAVED, ("--on-stall", "checkpoint")),
        "refused": (REFUSED, ("--on-stall", "checkpoint")),
    }
    words = {"resumes": "TM590", "confidential": "TM590", "saved": "saved the weights", "refused": "were not saved"}
    with ThreadPoolExecutor(1) as beside:
        woken = beside.submit(_wake, tmp_path, words)
        finished = run_each(tmp_path, scripts)
        woken.result()

    resumed = finished["resumes"]
    assert resumed.returncode == 0
    assert resumed.only.code == "TM590"
    assert resumed.only.severity == "warning"
    assert "the run resumed by itself after" in resumed.only.evidence[-1]
    assert "torchmedic: the run resumed after " in resumed.stderr

    hidden = finished["confidential"]
    assert hidden.only.severity == "warning", hidden.stderr
    assert all(not place.code for place in hidden.only.locations)

    saved = finished["saved"]
    (path,) = saved.run.glob("checkpoint-*-step4.pt")
    assert f"saved the weights and the optimizer to {path.relative_to(saved.run.parent)}" in saved.stderr
    held = torch.load(path, weights_only=True)
    mine = torch.load(saved.run.parent / "mine.pt", weights_only=True)
    (kept,) = held["models"].values()
    assert kept.keys() == mine.keys()
    assert all(torch.equal(kept[name], mine[name]) for name in mine)
    assert held["optimizers"][0]["state"][0]["step"] == 4

    assert "the weights were not saved: an update of the weights is under way" in finished["refused"].stderr
    assert not list(finished["refused"].run.glob("checkpoint-*"))


def _wake(folder: Path, words: dict[str, str]) -> None:
    """End the pause of each script as soon as torchmedic has said its words on it."""
    left = dict(words)

    def wake() -> bool:
        for name, wanted in list(left.items()):
            with contextlib.suppress(FileNotFoundError, ValueError):
                pid = int((folder / name / "pid").read_text())
                if wanted in Zygote.output(folder / name)[1]:
                    os.kill(pid, signal.SIGALRM)
                    del left[name]
        return not left

    awaited(wake)


HANGS = """
import threading
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stuck(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index > 40:
            open("stuck", "w").close()
            threading.Event().wait()
        return torch.rand(4)


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(Stuck(), batch_size=8, num_workers=2):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "ways",
    [
        {"terminate": (signal.SIGTERM, False, 4.0), "kill": (signal.SIGKILL, False, 1.5)},
        pytest.param(
            {"interrupt": (signal.SIGINT, False, 1.5), "kill child": (signal.SIGKILL, True, 4.0)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=" and ".join,
)
def test_nothing_is_left_whoever_is_ended_meanwhile(tmp_path: Path, ways: dict[str, tuple[int, bool, float]]) -> None:
    """Ctrl-C, SIGTERM and `kill -9` of the parent, and `kill -9` of the child, while it is examined and after it."""
    ours: set[int] = set()
    running = {name: _start(tmp_path / name.replace(" ", "_")) for name in ways}
    try:
        for name, (number, child, wait) in ways.items():
            process, folder = running[name]
            awaited((folder / "stuck").exists, 200)  # interpreters that import torch
            time.sleep(wait)
            family = psutil.Process(process.pid).children(recursive=True)
            assert family
            ours |= {each.pid for each in family}
            os.kill(family[0].pid if child else process.pid, number)
            process.wait(60)
            _, alive = psutil.wait_procs(family, timeout=60)
            assert not alive, (name, alive)
            if number != signal.SIGKILL or child:
                assert process.returncode == 128 + number, name
                msgspec.json.decode((folder / "run" / "report.json").read_bytes(), type=Report)
                assert not list((folder / "run" / "inside").glob("*.ask")), name
            assert not list((folder / "run").glob("**/.report.json.*")), name
        left = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in ours)]
        assert not left
    finally:
        for process, _ in running.values():
            process.kill()  # and with it, its child
            process.wait()


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir()
    (folder / "train.py").write_text(HANGS)
    command = [sys.executable, "-m", "torchmedic", "run", "--stall-after", "1", "-o", "run", "train.py"]
    with open(folder / "err.txt", "wb") as errors:
        started = subprocess.Popen(
            command, cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, stderr=errors, stdout=errors
        )
    return started, folder
