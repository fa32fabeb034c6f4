"""A list that was still being made when memory ran out: no name leads to it, and the exception has taken it away.

`rows = [parse(line) for line in file]` and `data = list(read())` hold everything that they have made, until they are
done. What fails is whatever asks for the next piece; what fills the memory is the line that collects the pieces.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import inspect
from itertools import pairwise
from typing import ClassVar, NamedTuple

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.memory import headroom
from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import callee

_COLLECTORS = frozenset("list tuple set frozenset dict sorted array asarray stack concatenate cat".split())
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_HEAP_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
_MIN_SHARE_OF_PEAK = 0.25  # of the most that the process ever had in memory
_PIECE = 8  # what is asked for is at most this part of what went away


class Unfinished(NamedTuple):
    frame: Frame
    gone: int  # bytes that went away with it


def unfinished_list(evidence: RaisedEvidence, asked: int | None) -> Unfinished | None:
    """The line that was collecting, if much of the memory went away when it failed.

    Args:
        evidence: Of the exception.
        asked: How much was asked for, if that is known.
    """
    sizes = headroom.sizes()
    most, now = sizes.get("VmHWM", 0), sizes.get("VmRSS", 0)
    gone = max(0, most - now) + _free_in_heap()
    if gone < _MIN_SHARE_OF_PEAK * most or (asked or 0) * _PIECE > gone:
        return None
    for frame, inner in reversed(list(pairwise(evidence.frames))):
        if frame.is_user and (_comprehends(frame) or (_collects(frame) and _gives_pieces(inner))):
            return Unfinished(frame, gone)
    return None


class _Heap(ctypes.Structure):
    """The numbers that `mallinfo2` of the C library gives."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in _HEAP_FIELDS]


def _free_in_heap() -> int:
    """Bytes that were freed and not given back: there were none when a small piece was refused."""
    with contextlib.suppress(AttributeError, OSError):  # another C library, or an older one
        ask = ctypes.CDLL(None).mallinfo2
        ask.restype = _Heap
        return int(ask().fordblks)
    return 0


def _comprehends(frame: Frame) -> bool:
    if frame.function in _COMPREHENSIONS:
        return True
    node, statement = frame.node, frame.statement
    if node is None or statement is None:
        return False
    inside = (each for each in ast.walk(statement) if isinstance(each, ast.ListComp | ast.SetComp | ast.DictComp))
    return any(node in set(ast.walk(each)) - set(ast.walk(each.generators[0].iter)) for each in inside)


def _collects(frame: Frame) -> bool:
    call = frame.node
    if not isinstance(call, ast.Call):
        return False
    name = callee(call)
    return name in _COLLECTORS or name == "join"


def _gives_pieces(frame: Frame) -> bool:
    return bool(frame.live.f_code.co_flags & inspect.CO_GENERATOR)
