"""Which variable, attribute or container of the user holds a tensor: a walk from everything that has a name.

The walk starts at the variables of the failing frames and of the user's modules, so that every tensor comes with a name
that the user knows. `source/objects/parts.py` tells what is inside an object.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.memory.accounting.holder import (
    Found,
    FoundArray,
    FoundPile,
    Holder,
    attribute_of,
    position_of,
    within,
)
from torchmedic.source.objects.containers import items, length
from torchmedic.source.objects.parts import Part, attributes_of_tensor, cache_of, is_users, own_dict, parts
from torchmedic.source.objects.plain_objects import Pile, pile_of, text_bytes
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_modules

_MAX_OBJECTS = 400_000
_MAX_LENT_OBJECTS = 100_000  # for what functions were given, which comes last
_MAX_DEPTH = 12  # names on the way; where there is one name for many pieces, these may lead to each other for long
_MAX_ATTRIBUTES = 64  # attributes of one object; more are no names but keys
_MAX_NAMED_ITEMS = 16  # keys of a dict that are named one by one
_MAX_PLAIN_ITEMS = 10_000  # items of a container that are all looked at, where the first are plain objects
_MIN_BYTES = 1 << 20  # bytes of plain objects that are worth a note
_MIN_RUN, _SAMPLES = 512, 64  # items of a list of numbers, and how many of them are looked at
_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN = frozenset({*_LEAVES, bytearray})
_SEQUENCES = (list, tuple, set, frozenset, deque)

_Visit = tuple[Any, Holder, int]  # an object, its name and its depth


def held_tensors(
    frames: Iterable[FrameType],
    skip: Iterable[int] = (),
    arrays: list[FoundArray] | None = None,
    piles: list[FoundPile] | None = None,
) -> Iterator[Found]:
    """Every tensor in reach of a name, with the first name that leads there, nearest first.

    Args:
        frames: The frames that the exception came through, innermost first.
        skip: Identities of objects not to look into: our own, and objects that are accounted for elsewhere.
        arrays: Takes the NumPy arrays that are met on the way.
        piles: Takes what is there in plain Python objects.
    """
    return _Walk(set(skip), arrays, piles).run(list(frames))


class _Walk:
    """One walk, in breadth."""

    def __init__(self, seen: set[int], arrays: list[FoundArray] | None, piles: list[FoundPile] | None) -> None:
        self._seen = seen
        self._arrays = arrays
        self._piles = piles
        self._pending: deque[_Visit] = deque()

    def run(self, frames: list[FrameType]) -> Iterator[Found]:
        lent: deque[_Visit] = deque()  # to a function, perhaps, by an attribute or container
        for holder, value in [*_globals(frames), *_locals(frames)]:
            (lent if holder.in_frame and _is_lent(holder, value) else self._pending).append((value, holder, 0))
        yield from self._follow(_MAX_OBJECTS)
        self._pending = lent
        yield from self._follow(_MAX_OBJECTS + _MAX_LENT_OBJECTS)

    def _follow(self, most: int) -> Iterator[Found]:
        pending, seen = self._pending, self._seen
        while pending and len(seen) < most:
            value, holder, depth = pending.popleft()
            kind = type(value)
            if id(value) in seen or self._is_text(value, holder) or issubclass(kind, _LEAVES) or _is_ours(value):
                continue
            seen.add(id(value))
            if issubclass(kind, torch.Tensor):
                yield Found(value, holder)
                for name, item in attributes_of_tensor(value):
                    pending.append((item, attribute_of(holder, value, name, item), depth + 1))
            elif self._is_data(value, holder, depth) or self._is_pile(value, holder):
                continue
            elif depth < _MAX_DEPTH or (holder.many and (issubclass(kind, (*_SEQUENCES, dict)) or is_users(kind))):
                with contextlib.suppress(Exception):  # an object of the user that raises when it is inspected
                    pending.extend(list(_inside(value, kind, holder, depth + 1)))

    def _is_text(self, value: Any, holder: Holder) -> bool:
        """Note one large text."""
        if self._piles is None or holder.many or (nbytes := text_bytes(value)) < _MIN_BYTES:
            return False
        self._seen.add(id(value))
        self._piles.append(FoundPile(Pile(nbytes, 1, type(value).__name__), holder))
        return True

    def _is_data(self, value: Any, holder: Holder, depth: int) -> bool:
        """Note a NumPy array; True if the array holds numbers only, no objects."""
        if type(value).__name__ != "ndarray" or type(value).__module__ != "numpy":
            return False
        base = value.base
        if base is not None and not isinstance(base, bytes | bytearray):
            self._pending.append((base, holder, depth + 1))
        elif self._arrays is not None:  # what was unpickled lies in the bytes that it was read from
            self._arrays.append(FoundArray(value.__array_interface__["data"][0], int(value.nbytes), holder))
        return bool(value.dtype != object)

    def _is_pile(self, value: Any, holder: Holder) -> bool:
        """Note a container of plain objects; True if it is too long to look at every item."""
        if self._piles is None or holder.many or _names_items(value):
            return False
        pile = pile_of(value)
        if pile is not None and pile.nbytes >= _MIN_BYTES:
            self._piles.append(FoundPile(pile, within(holder, value)))
        return pile is not None and not pile.data and pile.items > _MAX_PLAIN_ITEMS


def _is_lent(holder: Holder, value: Any) -> bool:
    """Whether a variable may be an argument whose value another name holds; that name is the better one."""
    if issubclass(type(value), torch.Tensor) or not is_user_file(holder.file):
        return True
    code = holder.scope
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return isinstance(value, (*_SEQUENCES, dict)) and holder.path in given


def _is_ours(value: Any) -> bool:
    """Whether an object is torchmedic's own, such as a hook that torch holds."""
    owner = value if isinstance(value, types.FunctionType) else type(value)
    return str(getattr(owner, "__module__", "")).startswith("torchmedic.")


def _globals(frames: list[FrameType]) -> Iterator[tuple[Holder, Any]]:
    known = {id(variables): (file, variables) for file, variables in user_modules()}
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


def _inside(value: Any, kind: type, holder: Holder, depth: int) -> Iterator[_Visit]:
    """What an object leads to, each with its name."""
    if issubclass(kind, dict):
        yield from _of_dict(value, holder, depth)
    elif issubclass(kind, _SEQUENCES):
        yield from _of_sequence(value, holder, depth)
    else:
        if issubclass(kind, functools._lru_cache_wrapper):
            yield cache_of(value), within(holder._replace(via="cache"), value), depth
        elif issubclass(kind, functools.partial):
            holder = within(holder, value)
        elif not holder.many and len(own_dict(value, kind) or ()) > _MAX_ATTRIBUTES:
            holder = within(holder._replace(via="attributes"), value)
        for part in parts(value, kind, libraries=True):
            inner = _holder_of(part, value, kind, holder)
            yield part.item, inner, 1 if issubclass(kind, type) else depth if inner.via == "" else 0


def _holder_of(part: Part, value: Any, kind: type, holder: Holder) -> Holder:
    """The name of one part of an object."""
    name, item, code = part.name, part.item, part.code
    if code is not None:
        variable = Holder(name, item, code.co_filename, code.co_name, code, False, local=part.line)
        # Of functions in a container, each of which has a tensor, the container is the better name.
        is_one_of_many = holder.many and issubclass(kind, types.FunctionType) and issubclass(type(item), torch.Tensor)
        return holder if is_one_of_many else variable
    if issubclass(kind, BaseException):
        return holder if holder.many else holder._replace(owner=value)
    if not name:
        return holder
    if issubclass(kind, type):
        return Holder(f"{value.__name__}.{name}", item, holder.file, "", value, False, value, name)
    return attribute_of(holder, value, name, item)


def _of_dict(value: Any, holder: Holder, depth: int) -> Iterator[_Visit]:
    named, inside = not holder.many and _names_items(value), within(holder, value)
    for key, item in items(value):
        if named or type(item) not in _PLAIN:
            yield item, holder._replace(path=f"{holder.path}[{key!r}]", owner=item) if named else inside, depth
    if issubclass(type(value), defaultdict) and isinstance(value.default_factory, types.FunctionType):
        yield value.default_factory, holder, depth


def _of_sequence(value: Any, holder: Holder, depth: int) -> Iterator[_Visit]:
    if _is_of_numbers(value):
        return
    few = not holder.many and isinstance(value, tuple) and _names_items(value)
    alone = _alone(value) if not holder.many and isinstance(value, list) else frozenset()
    inside = within(holder, value)
    for position, item in items(value):
        if few or type(item) not in _PLAIN:
            inner = position_of(holder, value, position, item) if few or position in alone else inside
            yield item, inner, depth if inner.via == "" else 0


def _is_of_numbers(value: Any) -> bool:
    """Whether a long list holds numbers or texts, judged by a sample: there may be thousands of such lists."""
    if type(value) not in (list, tuple) or len(value) <= _MIN_RUN:
        return False
    return all(type(each) in _PLAIN for each in value[:: len(value) // _SAMPLES])


def _names_items(value: Any) -> bool:
    """Whether the items of a container get names of their own: few keys, a short tuple, objects of distinct classes."""
    if isinstance(value, dict):
        return length(value) <= _MAX_NAMED_ITEMS and all(isinstance(key, str) for key in dict.keys(value))
    return length(value) <= 4 if isinstance(value, tuple) else isinstance(value, list) and bool(_alone(value))


def _alone(value: list[Any]) -> frozenset[int]:
    """Positions of objects that are the only ones of their class in a list, such as callbacks; these get names."""
    if length(value) > _MAX_NAMED_ITEMS:
        return frozenset()
    kinds = [type(each) for _, each in items(value)]
    return frozenset(at for at, kind in enumerate(kinds) if kinds.count(kind) == 1 and is_users(kind))


class SharedHolding(NamedTuple):
    """A name, and what it leads to in shared memory."""

    holder: Holder
    nbytes: int
    tensors: int


def shared_holdings(frames: Iterable[FrameType]) -> list[SharedHolding]:
    """The names that hold tensors in shared memory, the biggest first. A storage counts for the first name only."""
    found: dict[str, SharedHolding] = {}
    seen: set[int] = set()
    for tensor, holder in held_tensors(frames):
        if tensor.device.type != "cpu" or tensor.is_sparse or not tensor.is_shared():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        known = found.get(holder.path, SharedHolding(holder, 0, 0))
        found[holder.path] = SharedHolding(known.holder, known.nbytes + storage.nbytes(), known.tensors + 1)
    return sorted(found.values(), key=lambda each: -each.nbytes)
