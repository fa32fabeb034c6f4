"""A run with `--confidential` leaves nothing of the user's behind: no source, value, name, path or message."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from running import clean_environment
from zygote import Zygote

from torchmedic.records import Report
from torchmedic.runfolder import confidential, files, layout

pytestmark = pytest.mark.timeout(300)
SECRET = "zebrafalcon"  # in names, paths, messages and comments
VALUE = "31.415"  # in values

START = f"""
import os, sys, time, threading
import torch
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the script itself says is its own
torch.manual_seed(0)
{SECRET}_factor = {VALUE}  # {SECRET}
class {SECRET.title()}Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.{SECRET}_layer = torch.nn.Linear(4, 2)
    def forward(self, {SECRET}_batch):
        return self.{SECRET}_layer({SECRET}_batch) * {SECRET}_factor
{SECRET}_model = {SECRET.title()}Net()
optimizer = torch.optim.SGD({SECRET}_model.parameters(), lr=0.01)
def {SECRET}_step({SECRET}_x):
    optimizer.zero_grad()
    loss = {SECRET}_model({SECRET}_x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
for _ in range(3):
    {SECRET}_step(torch.randn(8, 4))
"""

# By family: the script, and the first letters of the codes of which one must be found.
FAMILIES = {
    "autograd": (
        f"""
{SECRET}_a = torch.ones(3, requires_grad=True)
{SECRET}_b = {SECRET}_a.exp()
{SECRET}_b += {VALUE}
{SECRET}_b.sum().backward()
""",
        "TM1",
    ),
    "numbers": (
        f"""
{SECRET}_x = torch.full((8, 4), {VALUE})
{SECRET}_x[2, 1] = float("nan")
{SECRET}_step({SECRET}_x)
{SECRET}_step({SECRET}_x)
""",
        "TM2",
    ),
    "devices": (
        f"""
{SECRET}_table = torch.nn.Embedding(10, 4)
{SECRET}_step({SECRET}_table(torch.tensor([3, 31])))
""",
        "TM3",
    ),
    "memory": (
        f"""
{SECRET}_huge = torch.ones(1 << 26)[:, None] * torch.ones(1 << 26)[None]
""",
        "TM4",
    ),
    "hang": (
        f"""
{SECRET}_lock = threading.Lock()
{SECRET}_lock.acquire()
def {SECRET}_wait():
    {SECRET}_lock.acquire()
{SECRET}_wait()
""",
        "TM5",
    ),
    "silent": (
        f"""
{SECRET}_frozen = torch.nn.Linear(4, 2)
other = torch.optim.SGD({SECRET}_frozen.parameters(), lr=0.1)
for _ in range(12):
    loss = {SECRET}_frozen(torch.randn(8, 4)).square().mean()
    loss.backward()
    other.step()
""",
        "TM6",
    ),
    "death": (
        f"""
import faulthandler, ctypes
def {SECRET}_crash():
    ctypes.string_at(0)
{SECRET}_crash()
""",
        "TM8",
    ),
    "worker": (
        f"""
class {SECRET.title()}Set(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, {SECRET}_index):
        raise KeyError("{SECRET} {VALUE}")
for batch in torch.utils.data.DataLoader({SECRET.title()}Set(), num_workers=1):
    pass
""",
        "TM",
    ),
    "message": (
        f"""
def {SECRET}_load():
    raise RuntimeError("{SECRET} at /data/{SECRET}/{VALUE}")
{SECRET}_load()
""",
        "TM9",
    ),
}


def run(folder: Path, source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the secret in its name and in its path; its private place is `private` beside the folder."""
    place = folder / SECRET
    (folder / "private").mkdir(mode=0o700)
    place.mkdir()
    script = place / f"{SECRET}_train.py"
    script.write_text(START + source)
    command = ["run", "--confidential", "--stall-after", "2", *options, str(script)]
    environment = clean_environment(XDG_RUNTIME_DIR=str(folder / "private"), **environment)
    status, out, err = Zygote.run(place, command, environment, 250)
    return subprocess.CompletedProcess(command, status, out, err)


def leaks(run_folder: Path) -> list[str]:
    """Files below a run folder that contain a secret, in their content or in their name."""
    found = []
    for path in run_folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        # The run folder lies in a folder with a secret name, and the file that links both places may say so.
        content = content.replace(str(run_folder).encode(), b"")
        words = content.lower() + path.relative_to(run_folder).as_posix().lower().encode()
        if SECRET.encode() in words or VALUE.encode() in words:
            found.append(f"{path.relative_to(run_folder)}: {content[:2000]!r}")
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}

    def one(name: str) -> subprocess.CompletedProcess[str]:
        options = ["--on-stall", "kill"] if name == "hang" else []
        return run(folders[name], FAMILIES[name][0], "--output", "run", *options)

    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(FAMILIES, pool.map(one, FAMILIES), strict=True))
    return {name: (folders[name], done[name]) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_diagnoses_leaks(
    finished: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], family: str
) -> None:
    folder, done = finished[family]
    place = folder / SECRET / "run"
    codes = [found.code for found in files.read_report(place).diagnoses]
    assert any(code.startswith(FAMILIES[family][1]) for code in codes), (codes, done.stderr)  # it was not just blind
    assert leaks(place) == []
    printed = done.stdout + done.stderr
    assert SECRET not in printed.lower()
    assert VALUE not in printed
    assert any(code in printed for code in codes) or codes == ["TM900"]  # in the traceback already
    assert list((folder / "private").iterdir()) == []  # what was needed meanwhile is gone


def test_a_contained_fault_does_not_leak(tmp_path: Path) -> None:
    source = f"""
class {SECRET.title()}Error(RuntimeError):
    def __str__(self):
        raise TypeError("{SECRET} {VALUE}")
raise {SECRET.title()}Error("{SECRET}")
"""
    done = run(tmp_path, source, "--output", "run", TORCHMEDIC_INJECT_FAULT="observe.exception")
    assert "fault of its own" in done.stderr
    assert SECRET not in done.stderr.lower()
    assert leaks(tmp_path / SECRET / "run") == []


def test_the_name_of_the_script_is_not_in_the_name_of_the_folder(tmp_path: Path) -> None:
    done = run(tmp_path, f'\nraise ValueError("{SECRET}")\n')
    (place,) = (path for path in (tmp_path / SECRET / ".torchmedic").iterdir() if path.is_dir())
    assert place.name.endswith("-run")
    assert SECRET not in done.stderr.lower()
    assert leaks(place) == []


HANGS = f"""
def {SECRET}_wait():
    time.sleep(1000)
print("up", flush=True)
{SECRET}_wait()
"""


def test_nothing_leaks_while_a_run_hangs(tmp_path: Path) -> None:
    place = tmp_path / SECRET
    place.mkdir()
    (tmp_path / "private").mkdir()
    (place / "train.py").write_text(START + HANGS)
    with subprocess.Popen(
        [sys.executable, "-m", "torchmedic", "run", "--confidential", "--stall-after", "1", "-o", "run", "train.py"],
        cwd=place,
        env={**clean_environment(), "XDG_RUNTIME_DIR": str(tmp_path / "private")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            until((place / "run" / "report.json").exists)
            (work,) = (tmp_path / "private").iterdir()
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            assert list((work / "inside").iterdir())  # the answer is there, but not in the run folder
            assert leaks(place / "run") == []
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert list((tmp_path / "private").iterdir()) == []


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_places_of_a_job_are_shared_and_stale_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_folder = layout.create("run", "x", tmp_path)
    work = confidential.mark_confidential(run_folder)
    assert confidential.mark_confidential(run_folder) == work == confidential.work_of(run_folder)
    assert confidential.run_of(work) == run_folder
    with confidential.in_use(work):
        with confidential.in_use(work):
            (work / "x").write_text("x")
        assert work.exists()  # the other rank still works
        os.utime(work, (0, 0))
        confidential.mark_confidential(layout.create("other", "x", tmp_path))
        assert work.exists()  # old, but in use
    assert not work.exists()
    with confidential.in_use(run_folder):
        pass
    assert run_folder.exists()  # only a private place is ever removed
    # A folder that was mailed may name anything.
    (run_folder / ".confidential").write_text(str(tmp_path))
    assert confidential.work_of(run_folder) == run_folder
    killed = confidential.mark_confidential(layout.create("third", "x", tmp_path))
    os.utime(killed, (0, 0))
    confidential.mark_confidential(layout.create("fourth", "x", tmp_path))
    assert not killed.exists()


PRIVATE = """
import os, sys, threading, time
import torch
os.umask(0)
class Items(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return torch.ones(4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Items(), num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
def open_to_others():
    for folder, folders, files in os.walk("run"):
        for name in [".", *folders, *files]:
            path = os.path.join(folder, name)
            wanted = 0o700 if os.path.isdir(path) else 0o600
            if os.lstat(path).st_mode & 0o777 != wanted:
                yield path, oct(os.lstat(path).st_mode)
lock = threading.Lock()
lock.acquire()
lock.acquire(timeout=6)  # looked at, and reported
print(list(open_to_others()), len(os.listdir("run/inside")), flush=True)
try:
    model(torch.ones(1, 5))
finally:
    os.abort()
"""


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRIVATE)
    before = os.umask(0)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torchmedic", "run", "--stall-after", "1", "--output", "run", "train.py"],
            cwd=tmp_path,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    finally:
        os.umask(before)
    assert done.returncode == 134
    listed, _, count = done.stdout.strip().rpartition(" ")
    assert (listed, int(count) > 0) == ("[]", True), done.stdout
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    names = {path.name for path in paths}
    assert {"report.json", "blackbox", "events.jsonl", "stacks", "inside"} <= names
    for path in paths:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert msgspec.json.decode((tmp_path / "run" / "report.json").read_bytes(), type=Report).diagnoses
