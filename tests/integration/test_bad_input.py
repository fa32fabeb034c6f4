"""Wrong input is one line and the right exit status; a disk that is full or not writable does not stop the training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import watched
from running import clean_environment

from torchmedic.cli import main
from torchmedic.records import Report
from torchmedic.runfolder import files

FAILING = "import torch\nprint('begun', flush=True)\ntorch.randn(2, 3) @ torch.randn(2, 3)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')")
    (tmp_path / "package").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("")
    (tmp_path / "damaged").mkdir()
    files.write_report(tmp_path / "damaged", Report())
    whole = (tmp_path / "damaged" / "report.json").read_bytes()
    (tmp_path / "damaged" / "report.json").write_bytes(whole[: len(whole) // 2])
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "required: VERB"),
        ("frobnicate", "frobnicate"),
        ("run", "nothing to run"),
        ("run --", "nothing to run"),
        ("run -m", "nothing to run"),
        ("run missing.py", "cannot find the script missing.py"),
        ("run package", "cannot run package: it is not a script"),
        ("run --frobnicate train.py", "--frobnicate"),
        ("run --format xml train.py", "xml"),
        ("run --output taken train.py", "cannot write to taken: it exists and is not empty"),
        ("run --output train.py/below train.py", "cannot make train.py/below: Not a directory"),
        ("run --output= train.py", "the name of the run folder is empty"),
        ("run --output", "expected one argument"),
        ("run -- no-such-command --x", "cannot start no-such-command: No such file or directory"),
        ("run -- ./train.py", "cannot start ./train.py: Permission denied"),
        ("explain TM999", "there is no diagnosis TM999"),
        ("explain TM151 TM152", "TM152"),
        ("report", "required: RUN"),
        ("report nowhere", "nowhere is not a run folder"),
        ("report package", "package is not a run folder"),
        ("report damaged", "it is damaged"),
        ("report train.py", "it is damaged"),
        ("report --format xml damaged", "xml"),
    ],
)
def test_one_line_and_status_2(folder: Path, capfd: pytest.CaptureFixture[str], words: str, says: str) -> None:
    if words == "run -- ./train.py" and os.access(folder / "train.py", os.X_OK):
        pytest.skip("the file system makes every file executable")

    assert main(words.split()) == 2

    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchmedic: ")
    assert captured.err.count("\n") == 1, captured.err
    assert says in captured.err


def test_a_module_that_is_not_there_is_pythons_business(tmp_path: Path) -> None:
    done = watched(tmp_path, "-m", "no_such_module")
    assert (done.status, done.stderr.count("\n")) == (1, 1)
    assert "No module named no_such_module" in done.stderr


def command(words: str, cwd: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell line in which `torchmedic` is ours."""
    line = words.replace("torchmedic", f"{sys.executable} -m torchmedic")
    return subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=clean_environment(**environment), capture_output=True, text=True, timeout=100
    )


def test_a_closed_pipe_and_a_full_output_are_no_traceback(folder: Path) -> None:
    done = command("torchmedic explain > /dev/full", folder)
    assert (done.returncode, done.stderr) == (1, "torchmedic: cannot write: No space left on device\n")
    done = command("set -o pipefail; torchmedic explain | true", folder)
    assert done.stderr == ""
    done = command("torchmedic run train.py > /dev/full", folder)
    assert "torchmedic" not in done.stderr.replace(sys.executable, "")
    done = command("torchmedic explain TM999 2> /dev/full", folder)
    assert done.returncode == 2


def test_a_closed_stream_is_silence_and_stays_closed_for_the_script(folder: Path) -> None:
    asking = "import os, sys\ntry:\n    os.fstat(1)\nexcept OSError:\n    sys.stderr.write(f'closed {sys.stdout}\\n')\n"
    (folder / "closed.py").write_text(asking + "print('unheard')\nsys.exit(5)\n")
    for words in ("python", "torchmedic run"):
        done = command(f"{words} closed.py >&-", folder)
        assert (done.returncode, done.stdout, done.stderr) == (5, "", "closed None\n"), words
    for words, status in (("explain TM201", 0), ("explain TM999", 2), ("--version", 0)):
        done = command(f"torchmedic {words} >&- 2>&-", folder)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", ""), words


def test_a_working_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "temp").mkdir()
    done = command(f"torchmedic run {tmp_path}/train.py", "/proc", TMPDIR=str(tmp_path / "temp"))
    assert (done.returncode, done.stdout) == (1, "begun\n")
    assert "[TM151]" in done.stderr
    assert list((tmp_path / "temp").glob(f"torchmedic-{os.getuid()}/*-train/report.json"))


def test_files_that_cannot_grow(tmp_path: Path) -> None:
    """Nothing can be written at all: the run is as without torchmedic, and one line says that it was not watched."""
    (tmp_path / "train.py").write_text(FAILING.replace("@", "*"))
    done = command("ulimit -f 0; torchmedic run train.py", tmp_path)
    assert (done.returncode, done.stdout) == (0, "begun\n")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "not watching, no run folder can be written: File too large" in done.stderr


def test_a_full_disk_is_reported_from_room_that_was_set_aside(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "model(torch.randn(1, 4)).sum().backward()\n"
        "with open('full', 'wb') as file:\n"
        "    while True:\n"
        "        file.write(bytes(4096))\n"
        "        file.flush()\n"
    )
    mount = "mkdir disk && mount -t tmpfs -o size=1m tmpfs disk && cp train.py disk && cd disk"
    if (
        shutil.which("unshare") is None
        or command(f"unshare -m bash -c '{mount}; umount .'; rmdir disk", tmp_path).returncode
    ):
        pytest.skip("a small file system can only be made by root")
    done = command(f"unshare -m bash -c '{mount} && torchmedic run train.py; echo $?; cat .t*/*/report.json'", tmp_path)
    assert done.stdout.startswith("1\n")
    assert "No space left on device" in done.stderr
    assert "error[" in done.stderr
    assert '"symptom"' in done.stdout
    assert "of its own" not in done.stderr
