"""`events.jsonl` as others than its writer read it: what a process has written of its start, its faults and its end."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from torchmedic.records import Fault, StackFrame
from torchmedic.runfolder import reading
from torchmedic.runfolder.layout import process_folders, worker_folders

EVENTS = "events.jsonl"
_LINE = re.compile(rb"[^\r\n]{12,}")

_Event = TypeVar("_Event", bound=msgspec.Struct)


class StartLine(msgspec.Struct, tag="start", tag_field="kind"):
    pid: int
    box: int | None = None  # the descriptor of the black box in that process


class FaultLine(msgspec.Struct, tag="fault", tag_field="kind"):
    fault: Fault


class ExceptionLine(msgspec.Struct, tag="exception", tag_field="kind"):
    symptom: str
    child: str = ""  # the name of the child of `multiprocessing` that ends with it


class DeathLine(msgspec.Struct, tag="death", tag_field="kind"):
    """An exception in this process only reported the death of another process."""

    pid: int
    signal: str
    part: Literal["script", "worker", "child"]
    at: StackFrame | None = None


class LostRankLine(msgspec.Struct, tag="lost-rank", tag_field="kind"):
    """An exception in this process only reported that another rank is gone, for a reason still unknown."""

    rank: int


class RaisedLine(msgspec.Struct, tag="raised", tag_field="kind"):
    """An exception ended the work of this rank at a time, in seconds since the epoch. It is explained after that.

    `lost` is that the exception only tells of a broken connection to another rank.
    """

    time: float
    lost: bool = False


_Line = StartLine | FaultLine | ExceptionLine | DeathLine | LostRankLine | RaisedLine


def read_events(folder: Path) -> list[_Line]:
    """The events of one process that the parent acts on. Other lines and damaged lines are skipped."""
    found: list[_Line] = []
    for line in _event_lines(folder):
        with contextlib.suppress(msgspec.DecodeError):
            found.append(reading.decode(line, _Line))  # type: ignore[arg-type]
    return found


def events_of(folder: Path, kind: str, record: type[_Event]) -> list[_Event]:
    """The events of one kind that a process has written, oldest first. Damaged lines are skipped."""
    found = []
    for line in _event_lines(folder):
        if f'"{kind}"'.encode() in line:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(reading.decode(line, record))
    return found


def lines(data: bytes) -> list[bytes]:
    """The lines that are long enough to be an event; a hostile file may have millions of empty ones."""
    return _LINE.findall(data)


def _event_lines(folder: Path) -> list[bytes]:
    try:
        return lines(reading.read(folder / EVENTS, cut=True))
    except OSError:
        return []


def folder_of(run: Path, pid: int) -> Path | None:
    """The folder of one process of the run."""
    for folder in process_folders(run):
        if any(line.pid == pid for line in events_of(folder, "start", StartLine)):
            return folder
    return None


def worker_folder_of(run: Path, pid: int, *, is_worker: bool) -> Path | None:
    """The folder of a DataLoader worker. All workers do the same and only one is examined, so any folder will do."""
    found = worker_folders(run)
    own = [folder for folder in found if folder.name.endswith(f".{pid}")]
    return next(iter([*own, *(reversed(found) if is_worker else ())]), None)


def read_faults(folder: Path) -> list[Fault]:
    """The contained faults of one process."""
    return [line.fault for line in read_events(folder) if isinstance(line, FaultLine)]


def read_symptom(folder: Path) -> str | None:
    """The symptom of the exception that ended one process."""
    return next((line.symptom for line in read_events(folder) if isinstance(line, ExceptionLine)), None)
