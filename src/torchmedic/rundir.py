"""Names and layout of a run folder: private, never overwritten, written atomically.

report.json                 the contract, one for all processes of the run
stacks/<pid>.txt            faulthandler's last words of a process
rank<N>[.<pid>]/            one folder per watched process
    blackbox                the memory-mapped ring
    events.jsonl            what happened, a line each
    diagnosis-<n>.json      found in that process; merged into report.json by the parent
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import tempfile
from pathlib import Path

import msgspec

from torchmedic.errors import UnreadableRun, UsageError
from torchmedic.records import Diagnosis, Fault, Report, encode

REPORT = "report.json"
BLACK_BOX = "blackbox"
EVENTS = "events.jsonl"
STACKS = "stacks"


def create(requested: str | None, script: str, cwd: Path) -> Path:
    """Make the folder of a new run, private to its owner.

    Raises:
        UsageError: The requested folder holds something else, or cannot be made.
    """
    if requested is not None:
        path = cwd / requested
        if (path / REPORT).exists() or (path.is_dir() and any(path.iterdir())) or path.is_file():
            raise UsageError(f"cannot write to {requested}: it exists and is not empty")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {requested}: {error.strerror}") from None
        path.chmod(0o700)
        return path.resolve()
    name = f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-{_slug(script)}"
    try:
        return _fresh(cwd / ".torchmedic", name)
    except OSError:
        # A read-only or full working directory is no reason not to train.
        return _fresh(Path(tempfile.gettempdir()) / f"torchmedic-{os.getuid()}", name)


def _fresh(parent: Path, name: str) -> Path:
    if not parent.is_dir():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            (parent / ".gitignore").write_text("*\n")
    for attempt in range(1000):
        path = parent / (name if not attempt else f"{name}-{attempt + 1}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path.resolve()
    raise OSError(f"no free name for {name}")


def _slug(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-.") or "run"


def claim_process_folder(run: Path, rank: int) -> Path:
    """Make the folder of one watched process: `rank0`, or `rank0.<pid>` where `rank0` is taken."""
    for name in (f"rank{rank}", f"rank{rank}.{os.getpid()}"):
        try:
            (run / name).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return run / name
    return run / f"rank{rank}.{os.getpid()}"


def process_folders(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("rank*") if path.is_dir())


def rank_of(folder: Path) -> int:
    match = re.match(r"rank(\d+)", folder.name)
    return int(match.group(1)) if match else 0


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new one, never half of one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_report(run: Path, report: Report) -> None:
    write_atomically(run / REPORT, encode(report))


def read_report(run: Path) -> Report:
    """Read `report.json` of a run folder, or a `report.json` itself.

    Raises:
        UnreadableRun: There is none, or it is damaged.
    """
    path = run / REPORT if run.is_dir() else run
    if not path.exists():
        raise UnreadableRun(f"{run} is not a run folder: there is no {REPORT} in it")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UnreadableRun(f"cannot read {path}: it is damaged ({error})") from None


def write_diagnosis(folder: Path, diagnosis: Diagnosis) -> None:
    count = len(list(folder.glob("diagnosis-*.json")))
    write_atomically(folder / f"diagnosis-{count}.json", encode(diagnosis))


def read_diagnoses(folder: Path) -> list[Diagnosis]:
    """The diagnoses made inside one process; a damaged file is passed over."""
    found = []
    for path in sorted(folder.glob("diagnosis-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Diagnosis))
    return found


class FaultLine(msgspec.Struct, tag="fault", tag_field="kind"):
    fault: Fault


def read_faults(folder: Path) -> list[Fault]:
    """Contained faults of one process, from its events; other lines and damaged ones are passed over."""
    faults = []
    with contextlib.suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                faults.append(msgspec.json.decode(line, type=FaultLine).fault)
    return faults


class ExceptionLine(msgspec.Struct, tag="exception", tag_field="kind"):
    symptom: str


def read_symptom(folder: Path) -> str | None:
    """How the exception that ended one process showed itself, from its events."""
    with contextlib.suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(line, type=ExceptionLine).symptom
    return None
