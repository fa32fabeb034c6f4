"""A wait status and what the dead left behind -> the incident to explain, or none."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from torchmedic.records import StackFrame, ThreadStack

# Ends that somebody asked for: the user, a scheduler, a closed terminal or pipe. Not incidents.
REQUESTED = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM"})

_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


def signal_name(status: int) -> str | None:
    """The signal that a wait status stands for; a shell reports a signal of its child as 128 + N."""
    number = -status if status < 0 else status - 128 if status > 128 else 0
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def read_stacks(path: Path) -> tuple[str, tuple[ThreadStack, ...]]:
    """Faulthandler's dump: its first line (`Fatal Python error: ...`) and the threads, the current one first."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "", ()
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), "")
    threads: list[tuple[bool, list[StackFrame]]] = []
    for line in lines:
        if "most recent call first" in line:
            threads.append((line.startswith("Current thread"), []))
        elif threads and (match := _FRAME.match(line)):
            number = match["line"]
            threads[-1][1].append(
                StackFrame(
                    file=match["file"],
                    line=int(number) if number.isdigit() else 0,
                    function=match["function"],
                )
            )
        elif line.startswith("Extension modules"):
            break
    threads.sort(key=lambda thread: not thread[0])
    return fatal, tuple(ThreadStack(current=current, frames=tuple(frames)) for current, frames in threads)
