"""Names and layout of a run folder: private, never overwritten, written atomically.

report.json                 the contract, one for all processes of the run
stacks/<pid>.txt            faulthandler's last words of a process
.parts/<rank>.json          the report of one rank, where each has a torchmedic of its own; report.json is all of them
worker-<N>.<pid>/           events and diagnoses of a DataLoader worker of rank N that has found something
rank<N>[.<pid>]/            one folder per watched process
    blackbox                the memory-mapped ring
    events.jsonl            what happened, a line each
    diagnosis-<n>.json      found in that process; merged into report.json by the parent
    .spare                  room that is given up when something has failed, there only during the run
    repro-<n>.json          the operation that failed, with its values in repro-<n>.safetensors
.confidential               there if no value may be kept
.no-checkup                 there if nobody shall look for mistakes that raise nothing
kernel.txt, gpu.json        what the parent knows of the GPU: see gpu_files.py
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.confidential import confidential
from torchmedic.errors import UnreadableRun, UsageError
from torchmedic.records import Diagnosis, Fault, Report, StackFrame, encode

REPORT = "report.json"
BLACK_BOX = "blackbox"
EVENTS = "events.jsonl"
STACKS = "stacks"
_JOB = ".job"
_PARTS = ".parts"
_SPARE = ".spare"
_SPARE_SIZE = 64 * 1024
_CONFIDENTIAL = ".confidential"
_NO_CHECKUP = ".no-checkup"


def create(requested: str | None, script: str, cwd: Path, job: str | None = None) -> Path:
    """Make the folder of a new run, private to its owner; all processes of one `job` get the same.

    Raises:
        UsageError: The requested folder holds something else, or cannot be made.
        OSError: No folder can be made anywhere.
    """
    if requested is not None:
        path = cwd / requested
        if _is_taken(path, job):
            raise UsageError(f"cannot write to {requested}: it exists and is not empty")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            _sign(path, job)
        except OSError as error:
            raise UsageError(f"cannot make {requested}: {error.strerror}") from None
        return path.resolve()
    name = f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-{_slug(script)}"
    try:
        return _fresh(cwd / ".torchmedic", name, job)
    except OSError:
        # A read-only or full working directory is no reason not to train.
        return _fresh(_private_temporary(), name, job)


def _is_taken(path: Path, job: str | None) -> bool:
    if job is not None and _signature(path) == job:
        return False
    try:
        return path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError:
        return False  # making it will say what is wrong


def _private_temporary() -> Path:
    shared = Path(tempfile.gettempdir()) / f"torchmedic-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    # Anybody may have put a folder of that name there.
    return shared if shared.lstat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="torchmedic-"))


def _fresh(parent: Path, name: str, job: str | None) -> Path:
    if not parent.is_dir():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = parent / ".gitignore"
    if not ignore.exists():
        with contextlib.suppress(OSError):
            ignore.write_text("*\n")
    if job is None:
        return _numbered(parent, name)
    with locked(parent / ".lock"):
        for path in sorted(parent.iterdir(), reverse=True):
            if _signature(path) == job:
                return path.resolve()
        path = _numbered(parent, name)
        _sign(path, job)
        return path


def _numbered(parent: Path, name: str) -> Path:
    for attempt in range(1000):
        path = parent / (name if not attempt else f"{name}-{attempt + 1}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path.resolve()
    raise OSError(f"no free name for {name}")


def _sign(path: Path, job: str | None) -> None:
    if job is not None:
        (path / _JOB).write_text(job)


def _signature(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (path / _JOB).read_text()
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock against the other processes of a job; where a file system has none, go on without."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _slug(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-.") or "run"


def mark_confidential(run: Path) -> None:
    """Tell every process of the run that it may keep no value of the user's."""
    (run / _CONFIDENTIAL).touch(mode=0o600)


def is_confidential(run: Path) -> bool:
    return (run / _CONFIDENTIAL).exists()


def mark_no_checkup(run: Path) -> None:
    """Tell every process of the run that it shall not look for mistakes that raise nothing."""
    (run / _NO_CHECKUP).touch(mode=0o600)


def wants_checkup(run: Path) -> bool:
    return not (run / _NO_CHECKUP).exists()


def claim_process_folder(run: Path, rank: int) -> Path:
    """Make the folder of one watched process: `rank0`, or `rank0.<pid>` where `rank0` is taken."""
    for name in (f"rank{rank}", f"rank{rank}.{os.getpid()}"):
        try:
            (run / name).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return run / name
    return run / f"rank{rank}.{os.getpid()}"


def claim_worker_folder(run: Path, rank: int) -> Path:
    """Make the folder of a DataLoader worker that has something to say."""
    path = run / f"worker-{rank}.{os.getpid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def worker_folders(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("worker-*") if path.is_dir())


def process_folders(run: Path) -> list[Path]:
    return sorted(path for path in run.glob("rank*") if path.is_dir())


def rank_of(folder: Path) -> int:
    match = re.match(r"(?:rank|worker-)(\d+)", folder.name)
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


def write_part(run: Path, rank: int, report: Report) -> list[Report]:
    """Put down one rank's report beside those of the others; all of them, by rank."""
    folder = run / _PARTS
    folder.mkdir(mode=0o700, exist_ok=True)
    write_atomically(folder / f"{rank}.json", encode(report))
    return [part for _, part in sorted(_parts(folder))]


def is_explained_by_another(run: Path, rank: int) -> bool:
    """Whether another rank, or who watches it, has put down an error of its own."""
    own = [
        each for folder in process_folders(run) if rank_of(folder) != rank for each in read_diagnoses(folder).values()
    ]
    of_parents = [each for number, part in _parts(run / _PARTS) if number != rank for each in part.diagnoses]
    return any(each.severity == "error" for each in [*own, *of_parents])


def _parts(folder: Path) -> Iterator[tuple[int, Report]]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            yield int(path.stem), msgspec.json.decode(path.read_bytes(), type=Report)


def reserve(folder: Path) -> None:
    """Set some room aside, so that a full disk can still be reported as one."""
    with open(folder / _SPARE, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, _SPARE_SIZE)


def release(folder: Path) -> None:
    """Give up the room that was set aside."""
    with contextlib.suppress(OSError):
        (folder / _SPARE).unlink()


def write_diagnosis(folder: Path, diagnosis: Diagnosis) -> int:
    """Put down what was found in one process; its number there."""
    if is_confidential(folder.parent):
        diagnosis = confidential(diagnosis)
    count = len(list(folder.glob("diagnosis-*.json")))
    path = folder / f"diagnosis-{count}.json"
    try:
        write_atomically(path, encode(diagnosis))
    except OSError:
        release(folder)
        write_atomically(path, encode(diagnosis))
    return count


def read_diagnoses(folder: Path) -> dict[Path, Diagnosis]:
    """The diagnoses made inside one process, by their files; a damaged one is passed over."""
    found = {}
    for path in sorted(folder.glob("diagnosis-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found[path] = msgspec.json.decode(path.read_bytes(), type=Diagnosis)
    return found


class StartLine(msgspec.Struct, tag="start", tag_field="kind"):
    pid: int


class FaultLine(msgspec.Struct, tag="fault", tag_field="kind"):
    fault: Fault


class ExceptionLine(msgspec.Struct, tag="exception", tag_field="kind"):
    symptom: str


class DeathLine(msgspec.Struct, tag="death", tag_field="kind"):
    """An exception in this process was only the news that another process has died."""

    pid: int
    signal: str
    part: Literal["script", "worker", "child"]
    at: StackFrame | None = None


_Line = StartLine | FaultLine | ExceptionLine | DeathLine


def read_events(folder: Path) -> list[_Line]:
    """The lines of one process's events that the parent acts on; other lines and damaged ones are passed over."""
    found: list[_Line] = []
    with contextlib.suppress(OSError):
        for line in (folder / EVENTS).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=_Line))
    return found


def folder_of(run: Path, pid: int) -> Path | None:
    """The folder of one process of the run."""
    for folder in process_folders(run):
        if any(isinstance(line, StartLine) and line.pid == pid for line in read_events(folder)):
            return folder
    return None


def worker_folder_of(run: Path, pid: int, *, is_worker: bool) -> Path | None:
    """The folder of a DataLoader worker; if it is one, then of another: all do the same, and only one of them looks."""
    found = worker_folders(run)
    own = [folder for folder in found if folder.name.endswith(f".{pid}")]
    return next(iter([*own, *(reversed(found) if is_worker else ())]), None)


def read_faults(folder: Path) -> list[Fault]:
    """Contained faults of one process."""
    return [line.fault for line in read_events(folder) if isinstance(line, FaultLine)]


def read_symptom(folder: Path) -> str | None:
    """How the exception that ended one process showed itself."""
    return next((line.symptom for line in read_events(folder) if isinstance(line, ExceptionLine)), None)


def stack_files(run: Path) -> dict[int, Path]:
    """Faulthandler's file of every process that has one."""
    return {int(path.stem): path for path in (run / STACKS).glob("*.txt") if path.stem.isdecimal()}


def drop_empty_stacks(run: Path) -> None:
    """Remove the files of processes that had nothing to say and are gone."""
    for pid, path in stack_files(run).items():
        with contextlib.suppress(OSError):
            if not path.stat().st_size and not Path(f"/proc/{pid}").exists():
                path.unlink()
