"""The records that all stages share: the diagnosis, the report, the black box.

`Report` is the content of `report.json`, which other programs read: fields are added, never renamed or removed.
Nothing here imports torch, so that the supervising parent can read and write all of it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from torchmedic.records.plain_text import cleaned, visible_json

SCHEMA = 1

Severity = Literal["error", "warning", "note"]
Grade = Literal["proven", "likely", "possible"]
Role = Literal["cause", "origin", "surfaced", "writer", "saver", "holder"]
Safety = Literal["safe", "changes-training", "edit"]
Phase = Literal["other", "data", "forward", "backward", "optimizer"]

PHASES: tuple[Phase, ...] = ("other", "data", "forward", "backward", "optimizer")


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """One labelled place in the source.

    Columns count characters of the file's line from 1; `end_column` is exclusive. `code` is that line without its
    indentation, which is `indent` characters.
    """

    role: Role
    file: str
    line: int
    column: int = 1
    end_column: int = 1
    code: str = ""
    indent: int = 0
    label: str = ""


class Treatment(msgspec.Struct, frozen=True, kw_only=True):
    """Advice. `proven`: a trial replay of `tried_on` passed with it; otherwise `result` is a prediction.

    `patch` is a unified diff without context lines, for `patch -p0`.
    """

    title: str
    safety: Safety = "edit"
    proven: bool = False
    result: str = ""
    patch: str = ""
    tried_on: str = "your step"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One named cause. The first location with role `cause` is the line to change or to inspect."""

    code: str
    name: str
    severity: Severity = "error"
    grade: Grade
    message: str
    cause: str
    step: int | None = None
    rank: int = 0
    locations: tuple[Location, ...] = ()
    evidence: tuple[str, ...] = ()
    treatments: tuple[Treatment, ...] = ()
    in_traceback: bool = False  # Python's own traceback says as much, so it is in the report only

    @property
    def cause_location(self) -> Location | None:
        return next((place for place in self.locations if place.role == "cause"), None)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the run. `symptom` is null if nothing was wrong."""

    exit_status: int | None = None
    signal: str | None = None
    steps: int = 0
    symptom: str | None = None


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job that failed or stands still: its part in the failure, what became of it, and its last call.

    `op` is the collective or message that the rank called last, `file` and `line` are the place of that call.
    """

    rank: int
    part: Literal["culprit", "victim"]
    fate: Literal["running", "ended", "raised", "died", "unknown"]
    signal: str = ""
    op: str = ""
    file: str = ""
    line: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `report.json`. `ranks` is empty unless several ranks run and one of them has an error."""

    schema: int = SCHEMA
    outcome: Outcome = Outcome()
    diagnoses: tuple[Diagnosis, ...] = ()
    ranks: tuple[RankEnd, ...] = ()


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A contained bug of torchmedic, or something that the system refused it."""

    where: str
    error: str
    traceback: str = ""
    refused: str = ""  # what the system refused, which is no bug: "cannot write: No space left on device"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the black box: the place of the training at one moment."""

    time: float
    step: int
    micro_step: int
    updates: int
    phase: Phase
    file: str
    line: int
    rss: int
    device_memory: int


class SignalOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the last fatal signal of a process came from.

    `code` is the `si_code`: positive if the processor reported a fault at `address`, otherwise the process `pid` sent
    the signal.
    """

    number: int
    code: int
    pid: int = 0
    address: int = 0


class BoxContents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a black box, oldest moment first."""

    pid: int
    started: float
    clean_exit: bool
    moments: tuple[Moment, ...]
    signal: SignalOrigin | None = None

    @property
    def last(self) -> Moment | None:
        return self.moments[-1] if self.moments else None


class StackFrame(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    line: int
    function: str


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """A thread in a faulthandler dump, innermost frame first."""

    current: bool
    frames: tuple[StackFrame, ...]


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A DataLoader worker's view of its own exception, sent to the main process with it."""

    pid: int
    worker: int | None
    exception: str
    message: str
    stage: Literal["sample", "collate", "other"]
    index: Any = None
    batch_indices: tuple[Any, ...] = ()
    frames: tuple[StackFrame, ...] = ()
    columns: tuple[int, int] = (1, 1)
    sample: str = ""
    sample_shapes: tuple[str, ...] = ()
    shared: int = 0  # bytes that were being shared with other processes when it failed
    sizes: dict[str, int] = msgspec.field(default_factory=dict)  # of its memory and limits: VmSize, RLIMIT_AS
    diagnosis: Diagnosis | None = None  # of an out-of-memory, made in the worker


def encode(record: msgspec.Struct) -> bytes:
    """Readable JSON with a final newline. No control character in it reaches a terminal."""
    return visible_json(msgspec.json.format(encode_line(record), indent=2).decode()).encode() + b"\n"


def encode_line(record: Any) -> bytes:
    """JSON in one line. A lone surrogate, as in the name of a file that is not UTF-8, is written as an escape."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(cleaned(record))
