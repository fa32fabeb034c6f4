"""The preparation of data, run once more to see which line made the first value that is not finite.

Of the function or the module that made the data, only the statements that the data depends on are run again, in a copy
of its variables; and the collate function of a loader. All of it is kept from the world outside and ends after some
seconds.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from torchmedic.evidence.bad_value_lines import Line, Watch
from torchmedic.evidence.dataset_item import collations_in_use, datasets_in_use
from torchmedic.observe.memory.host import free_bytes, host_memory
from torchmedic.observe.step.trainers import others_train
from torchmedic.replay.isolation.alarm import Alarm
from torchmedic.replay.isolation.sandbox import ReplayTooLong, harmless
from torchmedic.replay.isolation.torch_state import muted, preserved
from torchmedic.source.bindings import function_body
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.bad_value_makers import shares_memory
from torchmedic.source.lookup.preparing_statements import Slice, statements_making
from torchmedic.source.objects.finite import is_bad
from torchmedic.source.syntax import FUNCTIONS, callee, has_line, nodes_in
from torchmedic.source.user_code import is_user_file

_MAX_SECONDS = 10.0
_MAX_ITEMS = 4096  # of a batch
_MAX_ITERATED = 100_000  # items of a dataset without indices
_MAX_HOLDERS = 4  # variables that are made again
_MAX_DEPTH = 3  # of objects that hold the data
_ROOM_FACTOR = 1.5
_UNNAMED = "__torchmedic_data__"  # the name of a value that no variable of the user's holds


class _Holder(NamedTuple):
    """A variable that holds the bad data, and the statements that made it."""

    name: str
    frame: Frame
    slice: Slice


def line_in_preparation(
    frames: list[Frame],
    data: torch.Tensor | None,
    objects: list[Any],
    is_wrong: Callable[[Any, int], bool] = is_bad,
    *,
    whole_numbers: bool = False,
) -> Line | None:
    """The line that made data bad before the training loop began, found by making the data once more.

    Args:
        frames: Live ones, outermost first.
        data: The bad tensor.
        objects: What holds bad data as well, such as the data set of the batch.
        is_wrong: Given a value and a depth, tells whether it is bad, or holds something bad so deep inside.
        whole_numbers: Whether a whole number of Python's can be bad.
    """
    holders = list(_holders(frames, lambda value: _is_data(value, data, objects), objects))
    # A batch that was picked by hand shares no memory with the data that it was picked from.
    holders = holders or list(_holders(frames, lambda value: is_wrong(value, 0), []))
    for holder in holders[:_MAX_HOLDERS]:
        watch = Watch(is_wrong, whole_numbers=whole_numbers)
        result = watched(holder.frame.live, functools.partial(_made_again, holder), watch)
        found = _line_of(watch, result, is_wrong) if result is not None else None
        if found is not None:
            return found
    return None


def line_in_collate(
    frames: list[Frame], items: tuple[Any, ...], is_wrong: Callable[[Any, int], bool] = is_bad
) -> Line | None:
    """The line of a collate function that made a batch bad of items that are good."""
    if not frames or not items or len(items) > _MAX_ITEMS:
        return None
    for dataset, collate in collations_in_use():
        if _is_users(collate) or any(map(_is_users, getattr(collate, "__dict__", {}).values())):
            watch = Watch(is_wrong)
            run = functools.partial(_collated, dataset, collate, items, is_wrong)
            result = watched(frames[-1].live, run, watch)
            return watch.line_of(result) or watch.last if is_wrong(result, 3) else None
    return None


def _is_users(collate: Any) -> bool:
    """Whether a function, or an object that can be called, is the user's. A Trainer wraps such an object in its own."""
    if not callable(collate):
        return False
    function = collate if inspect.isroutine(collate) else type(collate).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def line_in_iteration(frames: list[Frame]) -> Line | None:
    """The line of a dataset without indices that made an item bad, found by iterating over the dataset once more."""
    for dataset in datasets_in_use() if frames else ():
        if not isinstance(dataset, IterableDataset):
            continue
        code = getattr(inspect.unwrap(type(dataset).__iter__), "__code__", None)
        # A generator function begins anew; another iterator may be the one that the loader is reading.
        if code is None or not code.co_flags & inspect.CO_GENERATOR or not is_user_file(code.co_filename):
            continue
        watch = Watch()
        item = watched(frames[-1].live, functools.partial(_first_bad, dataset), watch)
        found = watch.line_of(item) or watch.last if item is not None else None
        if found is not None:
            return found
    return None


def _first_bad(dataset: Any) -> Any:
    return next((item for item in itertools.islice(dataset, _MAX_ITERATED) if is_bad(item, 3)), None)


def _collated(dataset: Any, collate: Any, items: tuple[Any, ...], is_wrong: Callable[[Any, int], bool]) -> Any:
    fetched = [dataset[index] for index in items]
    return collate(fetched) if not any(is_wrong(item, 3) for item in fetched) else None


def watched(frame: FrameType, run: Callable[[], Any], watch: Watch) -> Any:
    """What something gives, run line by line; None where it cannot be run."""
    if not _has_room() or others_train():
        return None
    alarm = Alarm(time.monotonic() + _MAX_SECONDS, ReplayTooLong)
    with contextlib.suppress(Exception), preserved([], []), muted(), harmless(frame), alarm, watch:
        return run()
    return None


def _has_room() -> bool:
    """Whether all that the process holds would fit once more: as much may be loaded again."""
    memory = host_memory()
    is_limited = memory.address_limit is not None or memory.data_limit is not None
    return not is_limited and free_bytes() > _ROOM_FACTOR * (memory.resident or 0)


def _holders(frames: list[Frame], is_data: Callable[[Any], bool], objects: list[Any]) -> Iterator[_Holder]:
    """Variables of the user's frames that hold the data, the innermost first; then objects that no variable holds."""

    def holding(variables: dict[str, Any]) -> list[str]:
        return [
            name
            for name, value in list(variables.items())
            if not name.startswith("__") and any(map(is_data, _reachable(value, _MAX_DEPTH)))
        ]

    modules: set[str] = set()
    for number, frame in reversed(list(enumerate(frames))):
        body = function_body(frame) if frame.is_user else None
        if isinstance(body, FUNCTIONS):
            for name in holding(frame.variables):
                yield from _made(frame, name, frame.line)
                yield from _given(frames[number - 1], frame, name) if number else ()
        if body is not None and frame.tree is not None and frame.file not in modules:
            modules.add(frame.file)
            top = next((each for each in frames if each.file == frame.file and each.function == "<module>"), None)
            for name in holding(frame.live.f_globals):
                yield from _made(frame, name, top.line if top is not None else 0, frame.tree)
    for frame in reversed(frames):
        for value in objects if frame.is_user else ():
            yield from _constructed(frame, type(value).__name__)


def _made(frame: Frame, name: str, line: int, body: ast.AST | None = None) -> Iterator[_Holder]:
    """A variable, where statements of its own function, or of the module that is given, made it."""
    body = function_body(frame) if body is None else body
    if isinstance(body, FUNCTIONS | ast.Module):
        fixed = _fixed({**frame.live.f_globals, **frame.variables})
        found = statements_making(name, body.body, line, fixed)
        if found.statements:
            yield _Holder(name, frame, found)


def _given(caller: Frame, frame: Frame, name: str) -> Iterator[_Holder]:
    """An argument of a function that runs, as the expression of the caller makes it."""
    call, code = caller.node, frame.live.f_code
    names = list(code.co_varnames[: code.co_argcount])
    if not caller.is_user or not isinstance(call, ast.Call) or name not in names:
        return
    given = list(call.args)
    if names[0] == "self" and isinstance(call.func, ast.Attribute):
        given.insert(0, call.func.value)
    named = {each.arg: each.value for each in call.keywords}
    expression = named.get(name) or next((value for own, value in zip(names, given, strict=False) if own == name), None)
    if expression is not None:
        yield from _expressed(caller, expression, caller.line)


def _constructed(frame: Frame, name: str) -> Iterator[_Holder]:
    """An object that no variable holds, where a single expression of the frame's own function constructs it."""
    body = function_body(frame)
    calls = [node for node in nodes_in(frame.tree) if isinstance(node, ast.Call) and callee(node) == name]
    line = calls[0].lineno if len(calls) == 1 else 0
    if line and (isinstance(body, ast.Module) or (isinstance(body, FUNCTIONS) and has_line(body, line))):
        yield from _expressed(frame, calls[0], line)


def _expressed(frame: Frame, expression: ast.expr, line: int) -> Iterator[_Holder]:
    """The value of an expression, as if a variable held it."""
    body = function_body(frame)
    if isinstance(body, FUNCTIONS | ast.Module):
        last = ast.copy_location(ast.Assign([ast.Name(_UNNAMED, ast.Store())], expression), expression)
        fixed = _fixed({**frame.live.f_globals, **frame.variables})
        made = statements_making(_UNNAMED, body.body, line, fixed, last=ast.fix_missing_locations(last))
        yield _Holder(_UNNAMED, frame, made)


def _fixed(variables: dict[str, Any]) -> set[str]:
    """The names of modules, functions and classes, and of plain values such as a path, which are not made again."""
    return {
        name
        for name, value in variables.items()
        if inspect.ismodule(value)
        or inspect.isroutine(value)
        or isinstance(value, type | str | bytes | int | os.PathLike)
        or (isinstance(value, float) and not is_bad(value))
    }


def _is_data(value: Any, data: torch.Tensor | None, objects: list[Any]) -> bool:
    return any(value is each for each in objects) or (data is not None and shares_memory(value, data))


def _reachable(value: Any, depth: int) -> Iterator[Any]:
    """A value, the data set of a loader, the tensors of a module, and what the attributes of other objects hold."""
    yield value
    if not depth or inspect.ismodule(value) or isinstance(value, type | torch.Tensor | str):
        return
    inner: list[Any] = []
    if isinstance(value, torch.nn.Module):
        inner = [*value._buffers.values(), *value._parameters.values(), *value._modules.values()]
    elif isinstance(value, DataLoader | Subset):
        inner = [value.dataset]
    elif isinstance(value, list | tuple):
        inner = list(value[:_MAX_HOLDERS])
    elif isinstance(value, dict):
        inner = list(value.values())[:_MAX_HOLDERS]
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        inner = list(value.__dict__.values())
    for part in inner:
        yield from _reachable(part, depth - 1)


def _made_again(holder: _Holder) -> Any:
    """The variable, made by its statements in a copy of the frame's variables."""
    frame = holder.frame
    names = {**frame.live.f_globals, **frame.variables}
    for name in holder.slice.overwritten & names.keys():
        names[name] = copy.deepcopy(names[name])  # what the statements write into is the user's own
    code = compile(ast.Module(holder.slice.statements, []), frame.file, "exec")
    exec(code, names)
    return names.get(holder.name)


def _line_of(watch: Watch, result: Any, is_wrong: Callable[[Any, int], bool]) -> Line | None:
    """The line that made bad what a value, or an object that it leads to, holds."""
    parts = list(_reachable(result, _MAX_DEPTH))
    found = next((line for part in parts if (line := watch.line_of(part)) is not None), None)
    if found is None and any(is_wrong(part, 3) for part in parts):
        found = watch.only
    return found if found is not None and not found.is_stored else None
