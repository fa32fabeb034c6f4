"""The stacks that faulthandler wrote for a process that holds on to the GIL, as threads of Python."""

from __future__ import annotations

import re
import time

from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.source.user_code import is_user_file
from torchmedic.supervise.proc.thread_numbers import numbers_of

_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\)")
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_OURS = "torchmedic/observe/inside/"


def read_dump(text: str, view: ProcessView) -> InsideView | None:
    found: list[tuple[int, list[PyFrame]]] = []
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            found.append((int(head[1], 16), []))
        elif found and (match := _FRAME.match(line)) is not None:
            frame = PyFrame(
                file=match["file"],
                line=int(match["line"]),
                function=match["function"],
                user=is_user_file(match["file"]),
            )
            found[-1][1].append(frame)
    found = [(ident, frames) for ident, frames in found if not any(_OURS in frame.file for frame in frames)]
    if not found:
        return None
    numbers = numbers_of(view.pid, [ident for ident, _ in found])
    return InsideView(
        pid=view.pid,
        time=time.time(),
        by_signal=True,
        threads=tuple(
            PyThread(ident=ident, tid=numbers.get(ident, 0), main=numbers.get(ident) == view.pid, frames=tuple(frames))
            for ident, frames in found
        ),
    )
