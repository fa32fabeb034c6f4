"""Readers and writers of the files that `layout.py` lists. Writes are atomic; damaged files are skipped or reported."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from torchmedic.errors import UnreadableRun
from torchmedic.records import SCHEMA, Diagnosis, Report, encode, encode_line
from torchmedic.records.plain_text import cleaned
from torchmedic.runfolder import reading
from torchmedic.runfolder.layout import names_in, new_file, new_folder, process_folders, rank_of

REPORT = "report.json"
HTML = "report.html"
BLACK_BOX = "blackbox"
SETTINGS = "settings.json"
RANK_LOG = "collectives.json"
HANDLED = "handled.json"  # an exception that a rank handled when it called a collective
LEAVING = "leaving.json"  # where a rank left the job by itself
RANK_FACTS = "rank.json"
REMOTE_RANKS = "elsewhere"
STACKS = "stacks"
_PARTS = ".parts"
_SUPERVISOR = ".supervisor"
_SPARE = ".spare"
_SPARE_BYTES = 64 * 1024
_MAX_REPORT_BYTES = 16 << 20
_MAX_SETTINGS_BYTES = 1 << 16
_MAX_DIAGNOSES = 500
_MAX_PARTS = 1000  # locations, pieces of evidence and treatments of one diagnosis
_MAX_ALL_PARTS = 20_000  # of all diagnoses
_MAX_POSITION = 10_000_000  # lines of a file, characters of a line


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file; a reader sees the old or the new content, never a part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(handle, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_report(run: Path, report: Report) -> None:
    write_atomically(run / REPORT, encode(cleaned(report)))


def read_report(run: Path) -> Report:
    """Read the `report.json` of a run folder; `run` may also be the path of a `report.json`.

    Raises:
        UnreadableRun: The file is missing, damaged, too large, or of a newer torchmedic.
    """
    path, named = run, True
    try:
        if stat.S_ISDIR(os.stat(run).st_mode):
            path, named = run / REPORT, False
        data = reading.read(path, _MAX_REPORT_BYTES, follow=named)
        schema = reading.decode(data, _Schema).schema
        if schema > SCHEMA:
            raise UnreadableRun(
                f"cannot read {path}: it was made by a newer torchmedic (schema {schema}, this one reads {SCHEMA})"
            )
        report = reading.decode(data, Report)
    except FileNotFoundError:
        raise UnreadableRun(f"{run} is not a run folder: there is no {REPORT} in it") from None
    except OSError as error:
        raise UnreadableRun(f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UnreadableRun(f"cannot read {path}: it is damaged ({error})") from None
    return accepted(report, path)


class _Schema(msgspec.Struct):
    schema: int = SCHEMA


def accepted(report: Report, path: Path) -> Report:
    """A report that was read. Raises UnreadableRun if it holds too much."""
    excess = _excess(report)
    if excess:
        raise UnreadableRun(f"cannot read {path}: it holds {excess}")
    return report


def _excess(report: Report) -> str:
    """What in a report is larger than torchmedic writes it; empty if nothing is."""
    if len(report.diagnoses) > _MAX_DIAGNOSES:
        return f"{len(report.diagnoses)} diagnoses, more than {_MAX_DIAGNOSES}"
    total = 0
    for diagnosis in report.diagnoses:
        parts = len(diagnosis.locations) + len(diagnosis.evidence) + len(diagnosis.treatments)
        total += parts
        if parts > _MAX_PARTS:
            return f"a diagnosis of {parts} parts, more than {_MAX_PARTS}"
        if total > _MAX_ALL_PARTS:
            return f"diagnoses of more than {_MAX_ALL_PARTS} parts"
        for place in diagnosis.locations:
            for name in ("line", "column", "end_column", "indent"):
                if not 0 <= getattr(place, name) <= _MAX_POSITION:
                    return f"the {name} {getattr(place, name)}"
    return ""


def write_settings(run: Path, settings: msgspec.Struct) -> None:
    """Write the settings of a run that are not the default."""
    changed = {
        name: value
        for name, value in msgspec.to_builtins(settings).items()
        if value != msgspec.to_builtins(getattr(type(settings)(), name))
    }
    if changed:
        write_atomically(run / SETTINGS, encode_line(changed))


def read_settings(run: Path) -> dict[str, str]:
    """The settings of a run that are not the default, as text; empty if there are none or the file is damaged."""
    try:
        found = reading.decode(reading.read(run / SETTINGS, _MAX_SETTINGS_BYTES), dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
    return {str(name)[:80]: str(value)[:200] for name, value in list(found.items())[:40]}


def write_part(run: Path, rank: int, report: Report) -> list[Report]:
    """Write the report of one rank, and return the reports of all ranks, ordered by rank."""
    folder = run / _PARTS
    new_folder(folder, exist_ok=True)
    write_atomically(folder / f"{rank}.json", encode(cleaned(report)))
    return [part for _, part in sorted(_parts(folder))]


def errors_of_others(run: Path, rank: int) -> list[Diagnosis]:
    """Errors that other ranks, or their supervisors, have written."""
    own = [
        each for folder in process_folders(run) if rank_of(folder) != rank for each in read_diagnoses(folder).values()
    ]
    of_parents = [each for number, part in _parts(run / _PARTS) if number != rank for each in part.diagnoses]
    return [each for each in [*own, *of_parents] if each.severity == "error"]


def is_concluded(run: Path, rank: int) -> bool:
    """Whether the supervisor of a rank has reported how the rank ended."""
    return any(number == rank and part.outcome.symptom is not None for number, part in _parts(run / _PARTS))


def ended_well(run: Path, rank: int) -> bool:
    """Whether the supervisor of a rank has seen it end with status 0. It may have ended by `os._exit(0)`."""
    return any(number == rank and part.outcome.exit_status == 0 for number, part in _parts(run / _PARTS))


def _parts(folder: Path) -> Iterator[tuple[int, Report]]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            yield int(path.stem), reading.decode(reading.read(path), Report)


class SupervisorLine(msgspec.Struct):
    """The parent process of a run, or of one rank of it."""

    pid: int
    time: float


def write_supervisor(run: Path, rank: int | None) -> None:
    """Note who watches the run, before it starts. It also shows whether the folder can be written to."""
    write_atomically(_supervisor(run, rank), encode(SupervisorLine(os.getpid(), time.time())))


def remove_supervisor(run: Path, rank: int | None) -> None:
    """The parent process has told all it knows."""
    with contextlib.suppress(OSError):
        _supervisor(run, rank).unlink()


def _supervisor(run: Path, rank: int | None) -> Path:
    return run / (_SUPERVISOR if rank is None else f"{_SUPERVISOR}.{rank}")


def read_supervisors(run: Path) -> list[SupervisorLine]:
    found = []
    for name in names_in(run):
        if name.startswith(_SUPERVISOR):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(reading.decode(reading.read(run / name, _MAX_SETTINGS_BYTES), SupervisorLine))
    return found


def reserve(folder: Path) -> None:
    """Reserve some disk space, so that a full disk can still be reported."""
    with os.fdopen(new_file(folder / _SPARE), "wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, _SPARE_BYTES)


def release(folder: Path) -> None:
    """Give up the reserved disk space."""
    with contextlib.suppress(OSError):
        (folder / _SPARE).unlink()


def next_diagnosis(folder: Path) -> int:
    """The number of the next diagnosis of a process."""
    return len(list(folder.glob("diagnosis-*.json")))


def write_diagnosis(folder: Path, diagnosis: Diagnosis) -> int:
    """Write a diagnosis of one process, and return its number."""
    diagnosis = cleaned(diagnosis)
    count = next_diagnosis(folder)
    path = folder / f"diagnosis-{count}.json"
    try:
        write_atomically(path, encode(diagnosis))
    except OSError:
        release(folder)
        write_atomically(path, encode(diagnosis))
    return count


def read_diagnoses(folder: Path, known: Container[Path] = ()) -> dict[Path, Diagnosis]:
    """The diagnoses made inside one process, by file. Known and damaged files are skipped."""
    found = {}
    for name in names_in(folder):
        if name.startswith("diagnosis-") and name.endswith(".json") and (path := folder / name) not in known:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found[path] = reading.decode(reading.read(path), Diagnosis)
    return found


def stack_files(run: Path) -> dict[int, Path]:
    """The faulthandler files, by pid."""
    folder = run / STACKS
    names = (name for name in names_in(folder) if name.endswith(".txt") and name[:-4].isdecimal())
    return {int(name[:-4]): folder / name for name in names}


def drop_empty_stacks(run: Path) -> None:
    """Remove the empty faulthandler files of processes that have ended."""
    for pid, path in stack_files(run).items():
        with contextlib.suppress(OSError):
            if not path.stat().st_size and not Path(f"/proc/{pid}").exists():
                path.unlink()
    with contextlib.suppress(OSError):
        (run / STACKS).rmdir()  # refused where a file is left
