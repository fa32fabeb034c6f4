"""Which variable, attribute or container of the user's holds a tensor: a walk from everything that has a name.

The walk goes through containers, objects, closures, caches, exceptions and suspended generators. It starts at the
variables of the failing frames and of the user's modules, so that every find comes with a name a person knows.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from torchmedic.evidence.memory.accounting.holder import (
    Found,
    FoundArray,
    FoundPile,
    Holder,
    attribute_of,
    kept_by,
    local_of,
    position_of,
    within,
)
from torchmedic.observe.heap.plain_objects import Pile, pile_of, text_bytes
from torchmedic.source.objects.parts import attributes_of, cache_of, is_users
from torchmedic.source.user_code import is_user_file

_MOST = 400_000  # objects that are looked at
_MORE = 100_000  # for what functions were given, which comes last
_DEEP = 12  # names on the way; where there is one name for many pieces, these may lead to each other for long
_MANY = 64  # attributes of one object, which are then no names but keys
_FEW = 16  # keys of a dict that are named one by one
_LONG = 10_000  # items of a container that are not all looked at, where those that were are plain objects
_LARGE = 1 << 20  # bytes of plain objects that are worth a note
_RUN, _SAMPLES = 512, 64  # items of a list of numbers, and those that are looked at
_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN = frozenset({*_LEAVES, bytearray})
_INTERNAL = ("_parameters", "_buffers", "_modules")  # of a module, which shows what is in them as attributes
_SEQUENCES = (list, tuple, set, frozenset, deque)


def held_tensors(
    frames: Iterable[FrameType],
    skip: Iterable[int] = (),
    arrays: list[FoundArray] | None = None,
    piles: list[FoundPile] | None = None,
) -> Iterator[Found]:
    """Every tensor in reach of a name, with the first name that leads there, nearest first.

    Args:
        frames: Those that the exception came through, innermost first.
        skip: Identities of objects not to look into: our own, and those that are accounted for elsewhere.
        arrays: Takes the NumPy arrays that are met on the way.
        piles: Takes what is there in plain Python objects.
    """
    pending: deque[tuple[Any, Holder, int]] = deque()
    seen: set[int] = set(skip)
    listed = list(frames)
    lent: deque[tuple[Any, Holder, int]] = deque()  # to a function, perhaps, by an attribute or container
    for holder, value in [*_globals(listed), *_locals(listed)]:
        (lent if holder.in_frame and _is_lent(holder, value) else pending).append((value, holder, 0))
    most = _MOST
    while pending or lent:
        if not pending or len(seen) >= most:
            if not lent:
                break
            pending, lent, most = lent, deque(), _MOST + _MORE
        value, holder, depth = pending.popleft()
        if piles is not None and not holder.many and text_bytes(value) >= _LARGE and id(value) not in seen:
            seen.add(id(value))
            piles.append(FoundPile(Pile(text_bytes(value), 1, type(value).__name__), holder))
            continue
        if isinstance(value, _LEAVES) or id(value) in seen or _is_ours(value):
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.Tensor):
            yield Found(value, holder)
            for name, item in attributes_of(value):
                pending.append((item, attribute_of(holder, value, name, item), depth + 1))
            continue
        if type(value).__name__ == "ndarray" and type(value).__module__ == "numpy":
            base = value.base
            if base is not None and not isinstance(base, bytes | bytearray):
                pending.append((base, holder, depth + 1))
            elif arrays is not None:  # what was unpickled lies in the bytes that it was read from
                arrays.append(FoundArray(value.__array_interface__["data"][0], int(value.nbytes), holder))
            if value.dtype != object:
                continue
        if piles is not None and not holder.many and not _names_items(value):
            pile = pile_of(value)
            if pile is not None and pile.nbytes >= _LARGE:
                piles.append(FoundPile(pile, within(holder, value)))
            if pile is not None and not pile.data and pile.items > _LONG:
                continue
        if depth < _DEEP or (holder.many and (isinstance(value, (*_SEQUENCES, dict)) or is_users(type(value)))):
            try:
                pending.extend(list(_inside(value, holder, depth + 1)))
            except Exception:
                continue  # an object of the user's that does not like to be looked at


def _is_lent(holder: Holder, value: Any) -> bool:
    """Whether a variable may only have been given what something else holds: then that has the better name."""
    if issubclass(type(value), torch.Tensor) or not is_user_file(holder.file):
        return True
    code = holder.scope
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return isinstance(value, (*_SEQUENCES, dict)) and holder.path in given


def _is_ours(value: Any) -> bool:
    """Whether it is torchmedic's own: a hook, say, that torch has in its hands."""
    owner = value if isinstance(value, types.FunctionType) else type(value)
    return str(getattr(owner, "__module__", "")).startswith("torchmedic.")


def _globals(frames: list[FrameType]) -> Iterator[tuple[Holder, Any]]:
    known: dict[int, tuple[str, dict[str, Any]]] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, types.ModuleType) and isinstance(file, str) and is_user_file(file):
            known[id(vars(module))] = (file, vars(module))
    for frame in frames:
        if is_user_file(frame.f_code.co_filename):
            known.setdefault(id(frame.f_globals), (frame.f_code.co_filename, frame.f_globals))
    for file, names in known.values():
        for name, value in list(names.items()):
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                yield Holder(name, value, file, "", names, False), value


def _locals(frames: list[FrameType]) -> Iterator[tuple[Holder, Any]]:
    for frame in sorted(frames, key=lambda each: not is_user_file(each.f_code.co_filename)):
        if frame.f_locals is frame.f_globals:
            continue
        code = frame.f_code
        for name, value in list(frame.f_locals.items()):
            yield Holder(name, value, code.co_filename, code.co_name, code, True, local=code.co_firstlineno), value


def _inside(value: Any, holder: Holder, depth: int) -> Iterator[tuple[Any, Holder, int]]:
    """What an object leads to, each with its name."""
    if isinstance(value, dict):
        named, inside = not holder.many and _names_items(value), within(holder, value)
        for key, item in list(value.items()):
            if named or type(item) not in _PLAIN:
                yield item, holder._replace(path=f"{holder.path}[{key!r}]", owner=item) if named else inside, depth
        if isinstance(getattr(value, "default_factory", None), types.FunctionType):
            yield value.default_factory, holder, depth  # type: ignore[attr-defined]
    elif isinstance(value, _SEQUENCES):
        if _is_of_numbers(value):
            return
        few = not holder.many and isinstance(value, tuple) and _names_items(value)
        alone = _alone(value) if not holder.many and isinstance(value, list) else frozenset()
        inside = within(holder, value)
        for position, item in enumerate(list(value)):
            if few or type(item) not in _PLAIN:
                inner = position_of(holder, value, position, item) if few or position in alone else inside
                yield item, inner, depth if inner.via == "" else 0
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            try:
                item = cell.cell_contents
            except ValueError:
                continue
            inside = Holder(name, item, value.__code__.co_filename, value.__name__, value.__code__, False)
            yield item, kept_by(holder, inside, item), depth
        code = value.__code__
        arguments = reversed(code.co_varnames[: code.co_argcount])
        defaults = [*zip(arguments, reversed(value.__defaults__ or ()), strict=False)]
        for name, item in [*defaults, *(value.__kwdefaults__ or {}).items()]:
            here = Holder(name, item, code.co_filename, code.co_name, code, False, local=code.co_firstlineno)
            yield item, kept_by(holder, here, item), depth
        for name, item in value.__dict__.items():
            yield item, attribute_of(holder, value, name, item), depth
    elif isinstance(value, types.MethodType):
        yield value.__self__, holder, depth
        yield value.__func__, holder, depth
    elif isinstance(value, functools._lru_cache_wrapper):
        yield cache_of(value), within(holder._replace(via="cache"), value), depth
        yield value.__wrapped__, holder, depth
    elif isinstance(value, functools.partial):
        for item in gc.get_referents(value):
            yield item, within(holder, value), depth
    elif isinstance(value, ContextVar):
        yield value.get(None), holder._replace(path=f"{holder.path}.get()"), depth
    elif isinstance(value, logging.Logger):
        yield from ((handler, holder, depth) for handler in list(value.handlers))
    elif isinstance(value, types.GeneratorType | types.CoroutineType):
        frame = value.gi_frame if isinstance(value, types.GeneratorType) else value.cr_frame
        if frame is not None and is_user_file(frame.f_code.co_filename):
            for name, item in list(frame.f_locals.items()):
                yield item, local_of(frame, name, item), depth
    elif isinstance(value, BaseException):
        yield from _of_exception(value, holder, depth)
    elif isinstance(value, type):
        if is_user_file(str(getattr(sys.modules.get(value.__module__), "__file__", None) or "<library>")):
            for name, item in list(vars(value).items()):
                if not name.startswith("__"):
                    yield item, Holder(f"{value.__name__}.{name}", item, holder.file, "", value, False, value, name), 1
    elif not isinstance(value, types.ModuleType | types.FrameType | types.CodeType):
        yield from _attributes(value, holder, depth)


def _is_of_numbers(value: Any) -> bool:
    """Whether a long list is one of numbers or texts, by some of them: there may be thousands of such lists."""
    if type(value) not in (list, tuple) or len(value) <= _RUN:
        return False
    return all(type(each) in _PLAIN for each in value[:: len(value) // _SAMPLES])


def _names_items(value: Any) -> bool:
    """Whether what is in a container has names of its own: few keys, a few places of a tuple, lone objects."""
    if isinstance(value, dict):
        return len(value) <= _FEW and all(isinstance(key, str) for key in value)
    return len(value) <= 4 if isinstance(value, tuple) else isinstance(value, list) and bool(_alone(value))


def _alone(items: list[Any]) -> frozenset[int]:
    """Positions of objects of the user's that are the only ones of their class, as callbacks are: these have names."""
    if len(items) > _FEW:
        return frozenset()
    kinds = [type(each) for each in items]
    return frozenset(at for at, kind in enumerate(kinds) if kinds.count(kind) == 1 and is_users(kind))


def _attributes(value: Any, holder: Holder, depth: int) -> Iterator[tuple[Any, Holder, int]]:
    names = getattr(value, "__dict__", None)
    if isinstance(names, dict) and len(names) > _MANY and not holder.many:
        holder = within(holder._replace(via="attributes"), value)
    if isinstance(names, dict):
        for name, item in list(names.items()):
            if isinstance(value, torch.nn.Module) and name in _INTERNAL and isinstance(item, dict):
                yield from ((part, attribute_of(holder, value, key, part), depth) for key, part in list(item.items()))
            else:
                inner = attribute_of(holder, value, name, item)
                yield item, inner, depth if inner.via == "" else 0
    for kind in type(value).__mro__ if type(value).__module__ != "builtins" else ():
        for name in _slots(kind):
            item = getattr(value, name, None)
            inner = attribute_of(holder, value, name, item)
            yield item, inner, depth if inner.via == "" else 0
    if isinstance(value, (*_SEQUENCES, dict)):
        return
    if not isinstance(names, dict) and not _slots(type(value)):
        for item in gc.get_referents(value):  # a C type: what it holds has no name
            yield item, holder, depth


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _of_exception(error: BaseException, holder: Holder, depth: int) -> Iterator[tuple[Any, Holder, int]]:
    """An exception that was caught and kept holds the frames that it came through."""
    tb = error.__traceback__
    kept = holder if holder.many else holder._replace(owner=error)
    while tb is not None:
        for item in list(tb.tb_frame.f_locals.values()):
            yield item, kept, depth
        tb = tb.tb_next
    for item in (*error.args, *vars(error).values(), error.__context__, error.__cause__):
        yield item, kept, depth
