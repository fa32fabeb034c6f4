"""The preparation of data, run once more to see which line made the first value that is not finite.

Only what can be run again from the live frames is: a call of a function of the user's that made a variable, the
constructor of a data set, the collate function of a loader. It is kept from the world outside and ends after some
seconds.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchmedic.evidence.dataset_item import Line, Watch, collations_in_use
from torchmedic.observe.memory.host import free_bytes, host_memory
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.sandbox import ReplayTooLong, harmless
from torchmedic.replay.isolation.torch_state import muted, preserved
from torchmedic.source.live_frames import Frame
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.syntax import callee, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file

_MAX_SECONDS = 10.0
_MAX_ITEMS = 4096  # of a batch
_ROOM_FACTOR = 1.5


def line_in_call(frames: list[Frame], file: str, statement: ast.AST) -> Line | None:
    """The line inside of a function that a statement called to make its data."""
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr):
        return None
    for frame in _frames_of(frames, file, statement):
        if any(_is_users(call, frame) for call in ast.walk(value) if isinstance(call, ast.Call)):
            return _watched(frame.live, functools.partial(_evaluated, value, frame))
    return None


def line_in_constructor(frames: list[Frame], dataset: Any) -> Line | None:
    """The line that made a value bad while a data set was built, found by building another one."""
    name = type(dataset).__name__
    for frame in reversed(frames):
        tree = syntax_tree(frame.file) if frame.is_user else None
        calls = [node for node in nodes_in(tree) if isinstance(node, ast.Call) and callee(node) == name]
        if len(calls) == 1:
            return _watched(frame.live, functools.partial(_evaluated, calls[0], frame))
    return None


def line_in_collate(frames: list[Frame], items: tuple[Any, ...]) -> Line | None:
    """The line of a collate function that made a batch bad of items that are good."""
    if not frames or not items or len(items) > _MAX_ITEMS:
        return None
    for dataset, collate in collations_in_use():
        function = collate if inspect.isroutine(collate) else type(collate).__call__
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            return _watched(frames[-1].live, functools.partial(_collated, dataset, collate, items))
    return None


def _collated(dataset: Any, collate: Any, items: tuple[Any, ...]) -> Any:
    fetched = [dataset[index] for index in items]
    return collate(fetched) if not any(is_bad(item, 3) for item in fetched) else None


def _watched(frame: FrameType, run: Callable[[], Any]) -> Line | None:
    """Run something, and watch for the first bad value; None where there is none, or where it cannot be run."""
    watch = Watch()
    if not _has_room():
        return None
    alarm = Alarm(time.monotonic() + _MAX_SECONDS, ReplayTooLong)
    with contextlib.suppress(Exception), preserved([], []), muted(), harmless(frame), alarm:
        with watch:
            result = run()
        return watch.found if is_bad(result, 3) or _holds_bad(result) else None
    return None


def _has_room() -> bool:
    """Whether all that the process holds would fit once more: as much may be loaded again."""
    memory = host_memory()
    is_limited = memory.address_limit is not None or memory.data_limit is not None
    return not is_limited and free_bytes() > _ROOM_FACTOR * (memory.resident or 0)


def _holds_bad(value: Any) -> bool:
    """Whether an object has an attribute that is not finite."""
    return any(is_bad(each, 3) for each in (getattr(value, "__dict__", None) or {}).values())


def _evaluated(value: ast.expr, frame: Frame) -> Any:
    names = {**frame.live.f_globals, **frame.variables}
    return eval(compile(ast.Expression(value), frame.file, "eval"), names)


def _frames_of(frames: list[Frame], file: str, statement: ast.AST) -> list[Frame]:
    """The live frames whose function holds a statement; else those of the same module, for one at its top level."""
    line = getattr(statement, "lineno", 0)
    here = [frame for frame in reversed(frames) if frame.is_user and frame.file == file]
    inside = [frame for frame in here if frame.live.f_code.co_firstlineno <= line <= _last_line(frame)]
    return inside or here


def _last_line(frame: Frame) -> int:
    return max((line for *_, line in frame.live.f_code.co_lines() if line is not None), default=0)


def _found(node: ast.expr, frame: Frame) -> Any:
    """What a name or an attribute is, without running any code of the user's; None where that cannot be told."""
    with contextlib.suppress(KeyError, AttributeError):
        if isinstance(node, ast.Name):
            return frame.lookup(node.id)
        if isinstance(node, ast.Attribute):
            return inspect.getattr_static(_found(node.value, frame), node.attr)
    return None


def _is_users(call: ast.Call, frame: Frame) -> bool:
    """Whether a call is one of a function or a class of the user's."""
    value = _found(call.func, frame)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    if code is None and isinstance(value, type):
        code = getattr(getattr(value, "__init__", None), "__code__", None)
    return code is not None and is_user_file(code.co_filename)
