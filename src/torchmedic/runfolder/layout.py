"""The run folder: private, never overwritten, shared by all processes of the run. Its contents:

report.json                 the report, one for all processes of the run
report.html                 the report as a page; exists if something was found
settings.json               the settings of the run that are not the default; exists if there are any
stall[.<rank>].json         the last examination of a process that made no progress
stacks/<pid>.txt            stacks written by faulthandler when a process dies
.parts/<rank>.json          the report of one rank, if every rank has its own torchmedic; report.json merges them
worker-<N>.<pid>/           events and diagnoses of a DataLoader worker of rank N that has found something
rank<N>[.<pid>]/            one folder per watched process
    blackbox                the last moments of the process; written when it has ended, kept in memory until then
    events.jsonl            events, one per line
    collectives             the ring buffer of the collectives that it called, if it is one of several ranks; copied
                            from memory every few seconds while the process lives, and when it has ended
    elsewhere/<rank>.json   the collectives of a rank on another host, from the store of the job
    rank.json               what a rank tells of its training, for a comparison with other ranks
    collectives.json        the same with the calls that torch made itself; written on a question, a failure, at the end
    diagnosis-<n>.json      diagnoses made in that process; the parent merges them into report.json
    .spare                  disk space that is released on a failure; exists only during the run
    repro-<n>.json          the operation that failed, with its values in repro-<n>.safetensors
.confidential               exists if no values may be kept: see runfolder/confidential.py
.supervisor[.<rank>]        the parent process: its number and when it started; exists only during the run
.boxes[.<rank>]             a socket; processes hand the memory of box and ring to the parent there, during the run
.hold, held/                failing steps that wait for patches: see runfolder/held.py
.no-checkup                 exists if mistakes that raise no error shall not be searched for
.recover                    how far a run may go to survive an out-of-memory: "safe" or "all"; exists if it may
kernel.txt, gpu.json        what the parent knows about the GPUs: see runfolder/gpu.py
inside/                     questions to the processes: see runfolder/questions.py

`runfolder/files.py` and `runfolder/events.py` read and write the rest. Every file is made with `new_file` or
`write_atomically`, and every folder with `new_folder`, so that nobody else can read them, whatever the umask is.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torchmedic.errors import UsageError
from torchmedic.runfolder import reading

_JOB = ".job"
_BOXES = ".boxes"
_NO_CHECKUP = ".no-checkup"
_RECOVER = ".recover"
_SIGNED_SECONDS = 5.0  # that a rank may take from making the folder of the job to signing it
_MAX_JOB_BYTES = 1 << 16


def create(requested: str | None, script: str, cwd: Path, job: str | None = None, *, parent: str | None = None) -> Path:
    """Make the folder of a new run, private to its owner. All processes of one `job` get the same folder.

    Args:
        requested: The folder itself, from the command line.
        script: The name of the script, which becomes a part of the folder's name.
        cwd: The working folder.
        job: What identifies the launch of several ranks.
        parent: The folder in which every run gets its own folder (default: `.torchmedic`).

    Raises:
        UsageError: The requested folder is not empty, or cannot be made.
        OSError: No folder can be made anywhere, or there is no room for the requested one.
    """
    if requested is not None:
        if not requested:
            raise UsageError("the name of the run folder is empty")
        path = cwd / requested
        if _is_taken(path, job):
            raise UsageError(f"cannot write to {requested}: it exists and is not empty")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new_folder(path, exist_ok=True)
            _sign(path, job)
        except (FileNotFoundError, NotADirectoryError, FileExistsError, PermissionError) as error:
            # What exists is a file or a link to nothing: a folder would have done.
            reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
            raise UsageError(f"cannot make {requested}: {reason}") from None
        return path.resolve()
    name = f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-{_slug(script)}"
    try:
        return _fresh(cwd / (parent or ".torchmedic"), name, job, hide=parent is None)
    except OSError:
        # A read-only or full working directory must not stop the training.
        return _fresh(_private_temporary(), name, job)


def new_folder(path: Path, *, exist_ok: bool = False) -> Path:
    """Make a folder that only its owner can enter."""
    path.mkdir(mode=0o700, exist_ok=exist_ok)
    path.chmod(0o700)  # the umask may have taken rights of the owner
    return path


def new_file(path: Path) -> int:
    """Make or empty a file that only its owner can read, and return its descriptor. A link is refused."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def mark(path: Path, text: str = "") -> None:
    """Make a small file whose existence says something."""
    with os.fdopen(new_file(path), "w") as file:
        file.write(text)


def _is_taken(path: Path, job: str | None) -> bool:
    try:
        is_used = path.is_file() or (path.is_dir() and any(path.iterdir()))
    except OSError:
        return False  # making the folder will report the error
    return is_used and (job is None or not _is_of_job(path, job))  # in this order: a rank may make it in between


def _is_of_job(path: Path, job: str) -> bool:
    """Whether the folder belongs to the job. Another rank that has just made the folder is about to sign it."""
    end = time.monotonic() + _SIGNED_SECONDS
    while (found := _signature(path)) != job:
        try:
            is_new = path.is_dir() and time.time() - path.stat().st_ctime < _SIGNED_SECONDS
        except OSError:
            return False
        if not is_new or found or time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _private_temporary() -> Path:
    shared = Path(tempfile.gettempdir()) / f"torchmedic-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    # Another user may have made a folder with this name.
    return shared if shared.lstat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="torchmedic-"))


def _fresh(parent: Path, name: str, job: str | None, *, hide: bool = True) -> Path:
    """A new folder in `parent`; with `hide`, git is told to ignore the parent, which is then torchmedic's own."""
    if not parent.is_dir():
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    ignore = parent / ".gitignore"
    if hide and not ignore.exists():
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
            new_folder(path)
        except FileExistsError:
            continue
        return path.resolve()
    raise OSError(f"no free name for {name}")


def _sign(path: Path, job: str | None) -> None:
    if job is not None and _signature(path) != job:  # a file that is written again is empty for a moment
        mark(path / _JOB, job)


def _signature(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return reading.read(path / _JOB, _MAX_JOB_BYTES).decode()
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock against the other processes of a job; without a lock if the file system has none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _slug(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script).stem).strip("-.") or "run"


def mark_no_checkup(run: Path) -> None:
    """Tell every process of the run not to check for mistakes that raise no error."""
    mark(run / _NO_CHECKUP)


def wants_checkup(run: Path) -> bool:
    return not (run / _NO_CHECKUP).exists()


def mark_recovery(run: Path, level: str) -> None:
    """Tell every process of the run to go on after an out-of-memory."""
    mark(run / _RECOVER, level)


def recovery_level(run: Path) -> Literal["safe", "all"] | None:
    """How far a process may go to survive an out-of-memory; None if it may do nothing."""
    try:
        text = reading.read(run / _RECOVER, _MAX_JOB_BYTES)
    except OSError:
        return None
    return "safe" if text == b"safe" else "all" if text == b"all" else None


def claim_process_folder(run: Path, rank: int) -> Path:
    """Make the folder of one watched process: `rank0`, or `rank0.<pid>` where `rank0` is taken."""
    for name in (f"rank{rank}", f"rank{rank}.{os.getpid()}"):
        try:
            new_folder(run / name)
        except FileExistsError:
            continue
        return run / name
    return run / f"rank{rank}.{os.getpid()}"


def claim_worker_folder(run: Path, rank: int) -> Path:
    """Make the folder of a DataLoader worker that has something to report."""
    return new_folder(run / f"worker-{rank}.{os.getpid()}", exist_ok=True)


def box_address(run: Path, rank: int | None) -> Path:
    """The socket of a parent process: of the parent of one rank, or of the only parent in the run."""
    return run / (_BOXES if rank is None else f"{_BOXES}.{rank}")


def worker_folders(run: Path) -> list[Path]:
    return _folders(run, "worker-")


def process_folders(run: Path) -> list[Path]:
    return _folders(run, "rank")


def _folders(run: Path, start: str) -> list[Path]:
    """Folders whose name begins with `start`."""
    return [run / name for name in names_in(run) if name.startswith(start) and _is_folder(f"{run}/{name}")]


def names_in(folder: Path) -> list[str]:
    """The names in a folder. Called several times a second during a run, where `glob` is too slow."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _is_folder(path: str) -> bool:
    """Whether a path is a folder, and no link that may lead out of the run folder."""
    return os.path.isdir(path) and not os.path.islink(path)


def rank_of(folder: Path) -> int:
    match = re.match(r"(?:rank|worker-)(\d+)", folder.name)
    return int(match.group(1)) if match else 0
