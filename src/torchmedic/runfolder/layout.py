"""The folder of a run: private, never overwritten, shared by all its processes. What lies in it:

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
kernel.txt, gpu.json        what the parent knows of the GPU: see runfolder/gpu.py
inside/                     questions to its processes: see runfolder/questions.py

`runfolder/files.py` reads and writes the rest.
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

from torchmedic.errors import UsageError

_JOB = ".job"
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
    return _folders(run, "worker-")


def process_folders(run: Path) -> list[Path]:
    return _folders(run, "rank")


def _folders(run: Path, start: str) -> list[Path]:
    """Asked for several times a second while a run goes on, for which `glob` takes too long."""
    try:
        names = sorted(os.listdir(run))
    except OSError:
        return []
    return [run / name for name in names if name.startswith(start) and os.path.isdir(f"{run}/{name}")]


def rank_of(folder: Path) -> int:
    match = re.match(r"(?:rank|worker-)(\d+)", folder.name)
    return int(match.group(1)) if match else 0
