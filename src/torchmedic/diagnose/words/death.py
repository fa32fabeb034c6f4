"""What a dead process left behind, read for its last line: a dump of its stacks, else its black box."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.diagnose.words.format import at_moment, size
from torchmedic.records import Grade, Location, Role, StackFrame, ThreadStack
from torchmedic.records.death import Death
from torchmedic.source.user_code import PACKAGE, is_user_file, relative, source_line

_MAX_DUMPED_FRAMES = 100  # frames of a thread, by faulthandler
_MAX_SHOWN = 6


class LastLine:
    """The line of the user's code to look at, and how far it can be trusted."""

    def __init__(self, file: str, line: int, label: str, grade: Grade) -> None:
        self.grade: Grade = grade
        self.location = line_location("cause", file, line, label)


def last_line(death: Death) -> LastLine | None:
    """Where the process was when it died. Only a dump of the thread that died makes this more than `last seen`."""
    frame = _user_frame(death.threads[0]) if death.threads and death.threads[0].current else None
    if frame is not None:
        label = "here when the signal came" if death.from_outside else "it died in the code that this line called"
        return LastLine(frame.file, frame.line, label, "proven")
    # A thread that Python does not know of has died, as those of autograd are; the main thread is written last.
    frame = _user_frame(death.threads[-1]) if death.threads else None
    if frame is not None:
        return LastLine(frame.file, frame.line, "the main thread was here; another thread died", "likely")
    moment = death.box.last if death.box is not None else None
    if moment is not None and moment.file:
        return LastLine(moment.file, moment.line, f"last seen here, {_ago(death.ended - moment.time)}", "likely")
    if death.surfaced is not None:
        return LastLine(death.surfaced.file, death.surfaced.line, "noticed here", "likely")
    return None


def draft_of(rule: Rule[Any], death: Death, grade: Grade, message: str, cause: str) -> Draft:
    """The diagnosis of a death with everything that does not depend on its kind: the line, the threads, the moment."""
    place = last_line(death)
    draft = rule.draft(death, grade, message, cause)
    if place is not None:
        draft.at(place.location)
    if death.surfaced is not None:
        draft.at(line_location("surfaced", death.surfaced.file, death.surfaced.line, "noticed here"))
    return draft.because(*_calls(death), *_threads(death), *_moment(death))


def line_grade(death: Death) -> Grade:
    """The grade of the line to look at."""
    place = last_line(death)
    return place.grade if place is not None else "possible"


def who(death: Death) -> str:
    return {
        "script": "the process",
        "worker": f"a DataLoader worker (process {death.pid})",
        "child": f"a process that the script had started (process {death.pid})",
    }[death.part]


def shutting_down(death: Death) -> bool:
    """Whether the script was over, and only the interpreter had still to end."""
    return death.box is not None and death.box.clean_exit


def native_package(death: Death) -> str:
    """The installed package whose code was the last of Python to run; empty where that was the user's own."""
    if not death.threads or not death.threads[0].frames:
        return ""
    file = death.threads[0].frames[0].file
    if is_user_file(file):
        return ""
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = file.partition(f"{os.sep}{folder}{os.sep}")
        if found:
            return rest.split(os.sep)[0].removesuffix(".py")
    return "ctypes" if f"{os.sep}ctypes{os.sep}" in file else ""


def overflowed(death: Death) -> bool:
    """Whether the dead thread's Python stack was deeper than a dump shows."""
    return bool(death.threads) and death.threads[0].current and len(death.threads[0].frames) >= _MAX_DUMPED_FRAMES


def line_location(role: Role, file: str, line: int, label: str) -> Location:
    text = source_line(file, line)
    indent = len(text) - len(text.lstrip())
    return Location(
        role=role,
        file=relative(file),
        line=line,
        column=indent + 1,
        end_column=max(len(text.rstrip()), indent + 1) + 1,
        code=text.strip(),
        indent=indent,
        label=label,
    )


def _user_frame(thread: ThreadStack) -> StackFrame | None:
    return next((frame for frame in thread.frames if is_user_file(frame.file) and frame.line), None)


def _calls(death: Death) -> Iterator[str]:
    """The calls that led to the death."""
    if not death.threads:
        return
    thread = death.threads[0] if death.threads[0].current else death.threads[-1]
    innermost = thread.frames[0] if thread.frames else None
    if innermost is not None and not is_user_file(innermost.file):
        yield f"the last Python function was `{innermost.function}`, {_short(innermost)}"
    lines = [frame for frame in thread.frames if is_user_file(frame.file)]
    if len(lines) > 1:
        yield "called from " + ", ".join(f"{_short(frame)} in {frame.function}" for frame in lines[1 : _MAX_SHOWN + 1])


def _threads(death: Death) -> Iterator[str]:
    """Where every other thread was that is not torchmedic's."""
    shown = [thread for thread in death.threads[1:] if thread.frames and not _is_ours(thread)]
    for thread in shown[:_MAX_SHOWN]:
        frame = _user_frame(thread) or thread.frames[0]
        yield f"another thread was at {_short(frame)} in {frame.function}"
    if len(shown) > _MAX_SHOWN:
        yield f"{len(shown) - _MAX_SHOWN} more threads are in the run folder's stacks/{death.pid}.txt"


def _is_ours(thread: ThreadStack) -> bool:
    return not any(is_user_file(frame.file) for frame in thread.frames) and any(
        frame.file.startswith(PACKAGE) for frame in thread.frames
    )


def _moment(death: Death) -> Iterator[str]:
    if shutting_down(death):
        yield "the script itself had ended; the interpreter was shutting down"
        return
    moment = death.box.last if death.box is not None else None
    if moment is None:
        if death.part == "script":
            yield "training had not begun"
        return
    yield at_moment(moment.step, moment.phase)
    if moment.rss:
        yield f"resident memory at that moment: {size(moment.rss)}"


def _short(frame: StackFrame) -> str:
    installed = re.split(r"[/\\](?:site-packages|dist-packages|python3\.\d+)[/\\]", frame.file)
    return f"{installed[-1] if len(installed) > 1 else relative(frame.file)}:{frame.line}"


def _ago(seconds: float) -> str:
    if seconds < 1:
        return "less than a second before the end"
    if seconds < 120:
        return f"{seconds:.0f} s before the end"
    return f"{time.strftime('%H:%M:%S', time.gmtime(seconds))} before the end"
