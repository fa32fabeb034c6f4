"""The files of a run folder, which `layout.py` lists: written atomically; a damaged file is skipped or named."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import Diagnosis, Fault, Report, StackFrame, encode
from torchmedic.runfolder.confidential import confidential
from torchmedic.runfolder.layout import is_confidential, process_folders, rank_of, worker_folders

REPORT = "report.json"
BLACK_BOX = "blackbox"
EVENTS = "events.jsonl"
STACKS = "stacks"
_PARTS = ".parts"
_SPARE = ".spare"
_SPARE_SIZE = 64 * 1024


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


def errors_of_others(run: Path, rank: int) -> list[Diagnosis]:
    """What other ranks, or those who watch them, have put down as errors of their own."""
    own = [
        each for folder in process_folders(run) if rank_of(folder) != rank for each in read_diagnoses(folder).values()
    ]
    of_parents = [each for number, part in _parts(run / _PARTS) if number != rank for each in part.diagnoses]
    return [each for each in [*own, *of_parents] if each.severity == "error"]


def is_concluded(run: Path, rank: int) -> bool:
    """Whether who watches a rank has said how it ended."""
    return any(number == rank and part.outcome.symptom is not None for number, part in _parts(run / _PARTS))


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


def next_diagnosis(folder: Path) -> int:
    """The number that the next diagnosis of a process will have."""
    return len(list(folder.glob("diagnosis-*.json")))


def write_diagnosis(folder: Path, diagnosis: Diagnosis) -> int:
    """Put down what was found in one process; its number there."""
    if is_confidential(folder.parent):
        diagnosis = confidential(diagnosis)
    count = next_diagnosis(folder)
    path = folder / f"diagnosis-{count}.json"
    try:
        write_atomically(path, encode(diagnosis))
    except OSError:
        release(folder)
        write_atomically(path, encode(diagnosis))
    return count


def read_diagnoses(folder: Path, known: Container[Path] = ()) -> dict[Path, Diagnosis]:
    """The diagnoses made inside one process, by their files, but those that are known; a damaged one is passed over."""
    found = {}
    for name in _names(folder):
        if name.startswith("diagnosis-") and name.endswith(".json") and (path := folder / name) not in known:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found[path] = msgspec.json.decode(path.read_bytes(), type=Diagnosis)
    return found


def _names(folder: Path) -> list[str]:
    """Asked for several times a second while a run goes on, for which `glob` takes too long."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


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


class LostRankLine(msgspec.Struct, tag="lost-rank", tag_field="kind"):
    """An exception in this process was only the news that another rank is gone, and nobody had told yet why."""

    rank: int


_Line = StartLine | FaultLine | ExceptionLine | DeathLine | LostRankLine


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
    folder = run / STACKS
    names = (name for name in _names(folder) if name.endswith(".txt") and name[:-4].isdecimal())
    return {int(name[:-4]): folder / name for name in names}


def drop_empty_stacks(run: Path) -> None:
    """Remove the files of processes that had nothing to say and are gone."""
    for pid, path in stack_files(run).items():
        with contextlib.suppress(OSError):
            if not path.stat().st_size and not Path(f"/proc/{pid}").exists():
                path.unlink()
