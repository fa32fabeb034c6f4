"""The lines that take part when CUDA itself refuses: the user's, also where a worker or a child of theirs ran it."""

from __future__ import annotations

import re

from torchmedic.evidence.data_loading import Loading, loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.device import cuda_start
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, place
from torchmedic.source.user_code import is_user_file, user_frame


def raised_at(evidence: RaisedEvidence, label: str) -> tuple[Location, ...]:
    """The user's line that asked for CUDA, as the cause; for a worker's, also the one that asked for the batch."""
    remote = raised_remotely(evidence, label)
    if remote is not None:
        return (remote, *evidence.at_user_line("surfaced", "its result was waited for here"))
    loading = loading_of(evidence) if evidence.incident.worker is not None else None
    if loading is None:
        return evidence.at_user_line("cause", label)
    places = (
        loading.at_user_frame("cause", label) or loading.at_loader("cause", label),
        loading.at_loop("surfaced", "the batch was asked for here"),
    )
    return tuple(place for place in places if place is not None) or evidence.at_user_line("cause", label)


def worker_of(evidence: RaisedEvidence) -> Loading | None:
    """The failed batch of a DataLoader whose workers are processes of their own."""
    loading = loading_of(evidence)
    return loading if loading is not None and loading.failure.worker is not None else None


def started_at(evidence: RaisedEvidence, label: str) -> Location | None:
    """The user's line that forked this process: its frames are still on the stack of the child."""
    first = evidence.frames[0].live if evidence.frames else None
    frame = user_frame(first.f_back if first is not None else None)
    return Frame(frame, frame.f_lasti, frame.f_lineno).location("origin", label) if frame is not None else None


_LINE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.M)


def raised_remotely(evidence: RaisedEvidence, label: str) -> Location | None:
    """The user's line in a process of a pool, which sends its traceback to its parent as text."""
    text = getattr(evidence.incident.error.__cause__, "tb", None)
    lines = [found for found in _LINE.finditer(text) if is_user_file(found["file"])] if isinstance(text, str) else []
    return place("cause", lines[-1]["file"], int(lines[-1]["line"]), label) if lines else None


def cuda_started_at(label: str) -> Location | None:
    """The user's line that started CUDA in this process, or in the one that it was forked from."""
    line = cuda_start.started()
    return place("origin", line.file, line.line, label) if line is not None else None
