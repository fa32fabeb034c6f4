"""What leaves a run that was started with `--confidential`: `report.json`, and in it nothing of the user's.

The processes of such a run and their parent work in a folder outside of the run folder, in memory where the system has
such a place. Stacks, black boxes, events and answers are written there, and the folder is removed at the end of the
run. So `shown` is the only gate: what passes it is printed or written to the run folder, everything else is gone.

Each of both folders has a file `.confidential` that names the other one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from torchmedic.records import Diagnosis, Fault, Location
from torchmedic.runfolder import layout, reading

_MARK = ".confidential"
_IN_USE = ".in-use"
_PREFIX = "torchmedic-confidential-"
_MIN_STALE_SECONDS = 60.0  # a younger folder may not be locked yet
_MAX_PATH_BYTES = 1 << 16


def shown(diagnosis: Diagnosis) -> Diagnosis:
    """The code, the grade and the line numbers of a diagnosis, without source text, values, names and paths."""
    files = list(dict.fromkeys(place.file for place in diagnosis.locations))
    return replace(
        diagnosis,
        message=diagnosis.name.replace("-", " "),
        cause="left out, as the run was started with --confidential",
        locations=tuple(_hidden(place, files.index(place.file) + 1) for place in diagnosis.locations),
        evidence=(),
        treatments=tuple(
            replace(each, title="a cure was tried" if each.proven else "see explain", result="", patch="")
            for each in diagnosis.treatments
        ),
    )


def _hidden(place: Location, number: int) -> Location:
    return replace(place, file=f"file{number}", code="", label="")


def shown_fault(fault: Fault) -> Fault:
    """A contained fault without the text of its error, which may quote the user's values."""
    return Fault(where=fault.where, error=fault.error.partition(":")[0])


def is_confidential(run: Path) -> bool:
    """Whether a run folder, or the folder in which such a run works, is of a confidential run."""
    return (run / _MARK).exists()


def work_of(run: Path) -> Path:
    """The folder in which the processes of a run work now: another one than the run folder if it is confidential."""
    with contextlib.suppress(OSError, ValueError):
        work = Path(reading.read(run / _MARK, _MAX_PATH_BYTES).decode())
        # A run folder may come from another person.
        if work.name.startswith(_PREFIX) and work.parent in _places() and _is_own_folder(work):
            return work
    return run


def run_of(work: Path) -> Path:
    """The run folder to which a folder of a confidential run belongs; every other folder is its own."""
    with contextlib.suppress(OSError, ValueError):
        named = reading.read(work / _MARK, _MAX_PATH_BYTES).decode()
        if work.name.startswith(_PREFIX) and named:
            return Path(named)
    return work


def mark_confidential(run: Path) -> Path:
    """Make the folder in which the processes of a confidential run work. The ranks of a job share one.

    Raises:
        OSError: No such folder can be made.
    """
    with layout.locked(run / ".lock"):
        work = work_of(run)
        if work == run:
            work = _new_work()
            layout.mark(work / _MARK, str(run))
            layout.mark(run / _MARK, str(work))
        return work


@contextlib.contextmanager
def in_use(work: Path) -> Iterator[None]:
    """Keep the working folder of a confidential run; the last one who leaves it removes it. No effect on others."""
    if not work.name.startswith(_PREFIX):
        yield
        return
    descriptor = os.open(work / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        if _is_last(descriptor):
            shutil.rmtree(work, ignore_errors=True)
        os.close(descriptor)


def _is_last(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _new_work() -> Path:
    for place in _places():
        with contextlib.suppress(OSError):
            _remove_stale(place)
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    raise OSError("there is no private place for a confidential run")


def _places() -> list[Path]:
    """Folders for the work of a confidential run, those in memory first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime)] if runtime else []
    return [*found, Path("/dev/shm"), Path(tempfile.gettempdir())]


def _remove_stale(place: Path) -> None:
    """Remove the folders of runs whose supervisor was killed."""
    for path in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not _is_own_folder(path) or time.time() - path.stat().st_mtime < _MIN_STALE_SECONDS:
                continue
            descriptor = os.open(path / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _is_last(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_own_folder(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
