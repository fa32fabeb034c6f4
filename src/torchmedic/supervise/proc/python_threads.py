"""The Python threads of another process, as faulthandler wrote them down there."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from torchmedic.observe.frames import is_user_file
from torchmedic.stall_records import PyFrame, PyThread
from torchmedic.supervise.proc.process import PROC
from torchmedic.supervise.proc.thread_numbers import numbers_of

_HEAD = re.compile(
    r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-fA-F]+)(?: \[(?P<name>.*)\])? \(most recent call first\)"
)
_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3\.\d+t?/")


def is_user(file: str) -> bool:
    """Whether a file is the user's own. The process may run under another Python than ours, known by its place only."""
    return is_user_file(file) and not _STANDARD_LIBRARY.search(file)


def from_dump(dump: str, pid: int, *, proc: Path = PROC) -> tuple[PyThread, ...]:
    """The threads of a faulthandler dump, with the kernel's numbers of them while the process lives."""
    threads = _parse(dump)
    numbers = numbers_of(pid, [thread.ident for thread in threads], proc=proc)
    return tuple(
        msgspec.structs.replace(thread, tid=tid, main=tid == pid)
        for thread in threads
        for tid in (numbers.get(thread.ident, 0),)
    )


def _parse(dump: str) -> list[PyThread]:
    found: list[tuple[int, str, list[PyFrame]]] = []
    for line in dump.splitlines():
        if head := _HEAD.match(line):
            found.append((int(head["ident"], 16), head["name"] or "", []))
        elif found and (match := _FRAME.match(line)):
            number, file = match["line"], _unescaped(match["file"])
            found[-1][2].append(
                PyFrame(
                    file=file,
                    line=int(number) if number.isdigit() else 0,
                    function=_unescaped(match["function"]),
                    user=is_user(file),
                )
            )
        elif line.startswith(("Extension modules", "Current thread's C stack")):
            break
    return [PyThread(ident=ident, name=name, frames=tuple(frames)) for ident, name, frames in found]


def _unescaped(text: str) -> str:
    """faulthandler writes ASCII only."""
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)
