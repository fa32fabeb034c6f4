"""How tests run a script under torchmedic: in a folder of its own, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from zygote import Zygote

from torchmedic.records import Diagnosis, Report


class Finished(msgspec.Struct):
    """A run that is over."""

    returncode: int
    stdout: str
    stderr: str
    run: Path

    @property
    def report(self) -> Report:
        return msgspec.json.decode((self.run / "report.json").read_bytes(), type=Report)

    @property
    def only(self) -> Diagnosis:
        """The one diagnosis of a run that must have exactly one."""
        diagnoses = self.report.diagnoses
        assert len(diagnoses) == 1, f"{[found.code for found in diagnoses]}\n{self.stderr}"
        return diagnoses[0]


def clean_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHMEDIC_", "PYTEST_"))}
    if "PYTHONPATH" in kept:  # scripts run in folders of their own
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in kept["PYTHONPATH"].split(os.pathsep))
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1", **extra}


def torchmedic(folder: Path, *arguments: str, timeout: float = 250, **environment: str) -> Finished:
    """`torchmedic run --output run <arguments>` in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "run", "--output", "run", *arguments],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    return Finished(done.returncode, done.stdout, done.stderr, folder / "run")


def run_script(
    folder: Path,
    source: str,
    *arguments: str,
    name: str = "train.py",
    options: Sequence[str] = (),
    **environment: str,
) -> Finished:
    """Write a script and run it under torchmedic, forked from a process that has imported torch already.

    `options` are torchmedic's, `arguments` the script's.
    """
    (folder / name).write_text(source)
    command = ["run", "--output", "run", *options, name, *arguments]
    status, out, err = Zygote.run(folder, command, clean_environment(**environment), 250)
    return Finished(status, out, err, folder / "run")


def run_plain(folder: Path, source: str, *, name: str = "train.py", **environment: str) -> Finished:
    """Write a script and run it without `torchmedic run`. The run folder is the one that the script itself makes."""
    (folder / name).write_text(source)
    status, out, err = Zygote.plain(folder, name, clean_environment(**environment), 250)
    made = sorted(path for path in (folder / ".torchmedic").glob("*-*") if path.is_dir())
    return Finished(status, out, err, made[-1] if made else folder / "run")


def marked_line(source: str, mark: str = "# <- cause") -> int:
    """The number of the line that a script itself marks as the one to blame."""
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith(mark)]
    assert len(lines) == 1, f"mark exactly one line with {mark!r}"
    return lines[0]
