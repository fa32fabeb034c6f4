"""Where torchmedic cannot write, the script runs as without it, and at most one line says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import clean_environment, run_script

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import torch

weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    (weight * torch.ones(3)).sum().backward()
    optimizer.step()
print("trained", weight.tolist())
"""


def shell(folder: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A shell command in which `$python` is the interpreter; `$@` are the words after `$python`."""
    return subprocess.run(
        ["bash", "-c", command, "bash", *words],
        cwd=folder,
        # Python leaves half a .pyc file behind where files may not grow, which breaks all later runs.
        env=clean_environment(python=sys.executable, PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def said(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("torchmedic:")]


GONE = 'mkdir gone && cd gone && rmdir ../gone && "$python" "$@"'


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import sys\nprint(sys.path[1:], flush=True)\nsys.exit(3)\n")
    for options in ((), ("-o", "run")):
        other = shell(tmp_path, GONE, "-m", "torchmedic", "run", *options, str(script))
        plain = shell(tmp_path, GONE, str(script))

        assert (other.returncode, other.stdout, other.stderr) == (3, plain.stdout, plain.stderr)


def test_training_in_a_folder_that_is_gone(tmp_path: Path, script: str) -> None:
    plain = shell(tmp_path, GONE, script)
    if plain.returncode:
        pytest.skip("torch itself does not start in such a folder, because of oneMKL")
    other = shell(tmp_path, GONE, "-m", "torchmedic", "run", script)

    assert (other.returncode, other.stdout, other.stderr) == (0, plain.stdout, plain.stderr)


def test_a_folder_that_goes_during_the_run(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    leave = "import os, torch\nos.chdir('work')\nos.rmdir('../work')\ntorch.ones(3) + torch.ones(4)\n"
    other = run_script(tmp_path, leave)

    assert other.returncode == 1
    assert "error[TM153]" in other.stderr
    assert "fault of its own" not in other.stderr


@pytest.mark.parametrize("kilobytes", [20, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 80))])
def test_files_may_not_grow(tmp_path: Path, script: str, kilobytes: int) -> None:
    other = shell(tmp_path, f'ulimit -f {kilobytes}; "$python" "$@"', "-m", "torchmedic", "run", script)

    assert (other.returncode, other.stdout[:7]) == (0, "trained"), other.stderr
    assert len(said(other.stderr)) == len(other.stderr.splitlines()) == 1
    assert os.strerror(27) in other.stderr  # EFBIG


DISKS = {
    "full": ("size=1m", "head -c 2m /dev/zero > filler 2> /dev/null", "No space left on device"),
    "no inodes": ("size=1m,nr_inodes=3", "true", "No space left on device"),
    "read-only": ("size=1m,ro", "true", "Read-only file system"),
}


@pytest.mark.parametrize(
    "name",
    ["full", pytest.param("no inodes", marks=pytest.mark.slow), pytest.param("read-only", marks=pytest.mark.slow)],
)
def test_disks_that_take_nothing(tmp_path: Path, script: str, name: str) -> None:
    options, fill, reason = DISKS[name]
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs disk && cd disk"
    if shell(tmp_path, f"unshare -m bash -c '{mount}'").returncode:
        pytest.skip("nothing can be mounted here")
    inner = f'{mount} && {{ {fill}; "$python" -m torchmedic run -o run {script}; }}'
    other = shell(tmp_path, 'unshare -m bash -c "$1"', inner)

    assert other.returncode == 0, other.stderr
    assert other.stdout.startswith("trained")
    assert len(said(other.stderr)) == len(other.stderr.splitlines()) == 1
    assert reason in other.stderr
    assert "fault of its own" not in other.stderr
