"""Tools that start processes: every verb runs in a process of its own, so that it cannot disturb the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchmedic.assist.reading import report_text
from torchmedic.errors import TorchmedicError, UnreadableRun
from torchmedic.records.plain_text import visible
from torchmedic.runfolder import files, held

_MAX_TEXT = 20_000  # characters of an answer
_TAIL = 3000  # characters of the output of a script
_VERB_SECONDS = 180.0  # that a verb, or a trial of a patch, may take
_POLL_SECONDS = 0.2
_REPORT_SECONDS = 15.0  # from a held step to its report
_TERMINATE_SECONDS = 10.0


def verb(arguments: Sequence[str], base: Path, seconds: float) -> tuple[int, str, str]:
    """Run a verb of the command line: exit status, stdout and stderr.

    Raises:
        TorchmedicError: It takes longer than it may.
    """
    command = [sys.executable, "-m", "torchmedic", *arguments]
    try:
        done = subprocess.run(
            command, cwd=base, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise TorchmedicError(f"torchmedic {arguments[0]} took longer than {seconds:.0f} seconds") from None
    return done.returncode, done.stdout[-_MAX_TEXT:], done.stderr[-_MAX_TEXT:]


def verb_json(arguments: Sequence[str], base: Path) -> dict[str, Any]:
    """Run a verb that prints JSON. Raises TorchmedicError with the other text if it prints none."""
    _, out, err = verb(arguments, base, _VERB_SECONDS)
    try:
        found = json.loads(out)
    except ValueError:
        raise TorchmedicError(err.strip().removeprefix("torchmedic: ") or "there was no answer") from None
    return found if isinstance(found, dict) else {"findings": found}


def repro_text(folder: Path, base: Path) -> str:
    """A script with the failing operation, and whether it was seen to fail in the same way.

    Raises:
        TorchmedicError: The run has nothing to reproduce.
    """
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "repro.py"
        _, out, err = verb(["repro", "--output", str(script), str(folder)], base, 300.0)
        if not script.exists():
            raise TorchmedicError(err.strip().removeprefix("torchmedic: ") or "no script was written")
        checked = next((line for line in out.splitlines() if line.startswith("checked:")), "")
        return f"# {checked}\n{script.read_text()[:_MAX_TEXT]}"


class Runs:
    """The scripts that were started here. Whoever made it calls `close` at the end, which ends them."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._started: dict[Path, subprocess.Popen[bytes]] = {}
        self._outputs: dict[Path, Path] = {}

    def start(self, script: str, arguments: Sequence[str], hold: float, wait: float) -> dict[str, Any]:
        """Run a script under torchmedic until it ends, until its failing step is held, or for `wait` seconds."""
        parent = self._base / ".torchmedic"
        parent.mkdir(mode=0o700, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f"{time.strftime('%Y-%m-%dT%H%M%S')}-{Path(script).stem}-"))
        descriptor, output = tempfile.mkstemp(prefix="torchmedic-output-")
        self._outputs[folder] = Path(output)
        command = [sys.executable, "-m", "torchmedic", "run", "--output", str(folder), "--hold", f"{hold:g}"]
        with os.fdopen(descriptor, "wb") as file:
            self._started[folder] = subprocess.Popen(
                [*command, "--format", "concise", script, *arguments],
                cwd=self._base,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.state(folder, wait)

    def state(self, folder: Path, wait: float = 0.0) -> dict[str, Any]:
        """How a run stands: `ended`, `held` at its failing step, or `running`; with its report."""
        process = self._started.get(folder)
        end = time.monotonic() + wait
        while process is not None and process.poll() is None and not held.held_steps(folder):
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        status = process.poll() if process is not None else None
        is_held = bool(held.held_steps(folder))
        if is_held:
            _await_report(folder)
        try:
            text = report_text(folder)
        except (UnreadableRun, OSError):
            text = "there is no report yet"
        return {
            "run": os.path.relpath(folder, self._base),
            "state": "held" if is_held else "running" if process is not None and status is None else "ended",
            "exit_status": status,
            "report": text,
            "output_tail": self._tail(folder),
        }

    def _tail(self, folder: Path) -> str:
        path = self._outputs.get(folder)
        return visible(path.read_text(errors="replace")[-_TAIL:]) if path is not None and path.exists() else ""

    def stop(self, folder: Path) -> None:
        """End a script that was started here, with all its processes."""
        process = self._started.get(folder)
        if process is None:
            raise TorchmedicError(f"{folder.name} was not started by this server")
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATE_SECONDS)

    def close(self) -> None:
        for folder in list(self._started):
            self.stop(folder)
        for path in self._outputs.values():
            path.unlink(missing_ok=True)


def try_cure(folder: Path, patch: str) -> dict[str, Any]:
    """Run the failing step of a held run with a patch. Raises TorchmedicError if no step is held."""
    steps = held.held_steps(folder)
    if not steps:
        raise TorchmedicError(
            f"{folder.name} holds no failing step now, and a step cannot be replayed from files alone: start the "
            "script with the tool `run` (or `torchmedic run --hold 600`), then try the patch while it is held"
        )
    result = held.try_patch(folder, steps[0], patch, _VERB_SECONDS)
    return {
        "tried": not result.refused,
        "passed": result.passed,
        "result": result.refused or result.result,
        "on": f"the failing step {steps[0].step}, run once more in its own process with the patch",
    }


def _await_report(folder: Path) -> None:
    """Wait until the report holds what the held step was diagnosed with."""
    end = time.monotonic() + _REPORT_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(UnreadableRun, OSError):
            if files.read_report(folder).diagnoses:
                return
        time.sleep(_POLL_SECONDS)
