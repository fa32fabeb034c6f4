"""What the user's variables hold, by name: how long their containers are, how big their data, how old their graphs.

A walk from the frames on the stack and the modules of the user's code, bounded in time and never repeated often. It
notes numbers and names and keeps no object alive; only what `observe/leaks.py` finds growing is looked at closely.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.containers import CONTAINERS, length, pairs
from torchmedic.observe.frames import is_user_file
from torchmedic.observe.graph_age import node_of, oldest
from torchmedic.observe.user_variables import PLAIN, locals_of, roots

_MOST = 6000  # objects of one walk
_WIDE = 32  # items of a container that are all visited
_DEEP = 9
_BIG = 1 << 20  # bytes of one tensor, array or text that are worth a note
_PLAIN = PLAIN | {torch.dtype, torch.device, torch.Size, CellType}
_CLOSED = frozenset(
    "torch numpy builtins logging threading multiprocessing concurrent asyncio _io io socket subprocess importlib "
    "collections weakref typing abc enum re pathlib argparse datetime random torchmedic rich tqdm".split()
)
_OWN_OF_MODULES = frozenset({"_parameters", "_buffers", "training", "_non_persistent_buffers_set"})


class Held(NamedTuple):
    """One holder at one moment.

    `kind` says what `size` counts: `items` of a container, `bytes` of a tensor, array or text, or, for a tensor with a
    graph that was made since the last look, `age`: the smallest sequence number that the graph reaches back to.
    """

    name: str  # as the user writes it, seen from where the walk found it
    last: str  # its last identifier: of `self.history["loss"]` it is `history`
    kind: str
    size: int
    file: str  # in which it was found, empty for what several files share
    local: int  # first line of the function whose variable it is, 0 for others
    bounded: bool = False  # by itself, as a deque with a greatest length is
    old: int = 0  # nodes of its graph that are older than the last look, as far as they were counted


class Found(NamedTuple):
    """A walk: the holders, by what tells them apart, the items of those that grew, and whether it saw everything."""

    holders: dict[tuple[int, str], Held]
    weights: dict[tuple[int, str], Any]
    whole: bool


class _Todo(NamedTuple):
    value: Any
    name: str
    last: str
    depth: int
    file: str
    local: int


class Walk:
    """One walk.

    Args:
        since: The sequence number at the last one. Graphs that are no older are nobody's leak.
        sizes: Of the holders that the last one found; the items of those that have grown are weighed.
        weigh: What weighs a container.
        wanted: One holder whose value shall be kept in `value`.
        weigh_all: Whether to weigh those too that have not grown.
    """

    def __init__(
        self,
        since: int,
        sizes: Mapping[tuple[int, str], int],
        weigh: Callable[[Any], Any],
        wanted: tuple[int, str] | None = None,
        *,
        weigh_all: bool = False,
    ) -> None:
        self._since = since
        self._wanted = wanted
        self._weigh_all = weigh_all
        self.value: Any = None  # of the one that is wanted
        self._sizes = sizes
        self._weigh = weigh
        self._weights: dict[tuple[int, str], Any] = {}
        self._holders: dict[tuple[int, str], Held] = {}
        self._seen: set[int] = set()
        self._nodes: set[Any] = set()
        self._pending: deque[_Todo] = deque()

    def run(self, frame: FrameType | None, others: Iterable[Any] = ()) -> Found:
        """Walk from a frame and those around it. `others` need not have a name: they are called by their class."""
        for file, local, name, value in roots(frame):
            self._pending.append(_Todo(value, name, name, 0, file, local))
        for value in others:
            name = type(value).__name__
            self._pending.append(_Todo(value, name, name, 0, "", 0))
        pending, seen = self._pending, self._seen
        while pending and len(seen) < _MOST:
            todo = pending.popleft()
            kind = type(todo.value)
            if kind in _PLAIN or id(todo.value) in seen:
                continue
            seen.add(id(todo.value))
            with contextlib.suppress(Exception):  # an object of the user's that does not like to be looked at
                self._visit(todo, kind)
        whole = not pending
        pending.clear()
        self._nodes.clear()
        return Found(self._holders, self._weights, whole)

    def _visit(self, todo: _Todo, kind: type) -> None:
        value = todo.value
        if issubclass(kind, torch.Tensor):
            self._tensor(todo)
        elif kind is str or kind is bytes or kind is bytearray:
            self._note(todo, "bytes", len(value), least=_BIG)
        elif issubclass(kind, CONTAINERS):
            self._container(todo)
        elif kind is tuple or issubclass(kind, tuple):
            self._items(todo, ((str(index), part) for index, part in pairs(value, _WIDE)))
        elif todo.depth < _DEEP:
            self._object(todo, kind)

    def _note(self, todo: _Todo, kind: str, size: int, *, least: int = 1, bounded: bool = False, old: int = 0) -> None:
        if size < least:
            return
        key = (id(todo.value), todo.last) if kind == "items" else (0, f"{kind} {todo.name}")
        if key == self._wanted:
            self.value = todo.value
        self._holders.setdefault(key, Held(todo.name, todo.last, kind, size, todo.file, todo.local, bounded, old))
        if kind != "items":
            return
        # Made anew with a longer one, as in `losses = losses + [loss]`, it is known only by its name.
        before = self._sizes.get(key, self._sizes.get((0, todo.name), size))
        if self._weigh_all or (not bounded and size > before):
            self._weights[key] = self._weigh(todo.value)

    def _tensor(self, todo: _Todo) -> None:
        tensor = todo.value
        if isinstance(tensor, torch.nn.Parameter):
            return
        node = node_of(tensor)
        if node is not None and self._since and node._sequence_nr() >= self._since:
            age, old = oldest(node, self._since, self._nodes)
            if age < self._since:
                self._note(todo, "age", age, least=0, old=old)
        if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
            self._note(todo, "bytes", tensor.nbytes, least=_BIG)

    def _container(self, todo: _Todo) -> None:
        value = todo.value
        self._note(todo, "items", length(value), bounded=getattr(value, "maxlen", None) is not None)
        if todo.depth < _DEEP:
            self._items(todo, ((_shown(key), part) for key, part in pairs(value, _WIDE)))

    def _items(self, todo: _Todo, items: Iterable[tuple[str, Any]]) -> None:
        for key, item in items:
            if type(item) not in _PLAIN:
                self._pending.append(
                    _Todo(item, f"{todo.name}[{key}]", todo.last, todo.depth + 1, todo.file, todo.local)
                )

    def _object(self, todo: _Todo, kind: type) -> None:
        value = todo.value
        if isinstance(value, torch.nn.Module):
            self._module(todo, kind)
        elif isinstance(value, FunctionType):
            self._function(todo, value)
        elif isinstance(value, MethodType):
            self._add(todo, "", value.__self__)
            self._add(todo, "", value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(todo, "", part)
        elif isinstance(value, BaseException):
            self._exception(todo, value)
        elif isinstance(value, GeneratorType):
            if value.gi_frame is not None:
                self._frame(todo, value.gi_frame)
        elif isinstance(value, type):
            if is_user_file(getattr(sys.modules.get(value.__module__), "__file__", None) or "<>"):
                for name, item in list(vars(value).items()):
                    if isinstance(item, (*CONTAINERS, torch.Tensor)) and not name.startswith("__"):
                        self._add(todo, name, item)
        elif kind.__name__ == "_lru_cache_wrapper":
            info = value.cache_info()
            self._note(todo, "items", info.currsize, bounded=info.maxsize is not None)
            self._add(todo, "", value.__wrapped__)
        elif kind.__name__ == "ndarray" and _module_of(kind) == "numpy":
            self._note(todo, "bytes", value.nbytes if value.base is None else 0, least=_BIG)
        elif isinstance(value, ModuleType):
            return
        else:
            root = _module_of(kind).partition(".")[0]
            if root not in _CLOSED or _module_of(kind).startswith("torch.utils.data"):
                self._attributes(todo, kind)

    def _attributes(self, todo: _Todo, kind: type) -> None:
        found = object.__getattribute__(todo.value, "__dict__") if kind.__dictoffset__ else None
        if type(found) is dict:
            for name, item in list(found.items()):
                if type(item) not in _PLAIN and isinstance(name, str):
                    self._add(todo, name, item)
        for owner in kind.__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__"):
                    self._add(todo, name, getattr(todo.value, name, None))

    def _module(self, todo: _Todo, kind: type) -> None:
        for name, item in list(todo.value.__dict__.items()):
            if name == "_modules":
                for child, module in list(item.items()):
                    self._add(todo, child, module)
            elif name == "_buffers":
                for buffer, tensor in list(item.items()):
                    self._add(todo, buffer, tensor)
            elif name in _OWN_OF_MODULES or type(item) in _PLAIN:
                continue
            elif "_hooks" in name and isinstance(item, dict):
                for hook in list(item.values()):
                    self._add(todo, "", hook)
            elif not name.startswith("_") or not _module_of(kind).startswith("torch."):
                self._add(todo, name, item)

    def _function(self, todo: _Todo, function: FunctionType) -> None:
        code = function.__code__
        if not is_user_file(code.co_filename) and function.__closure__ is None:
            return
        file, line = code.co_filename, code.co_firstlineno
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._pending.append(_Todo(cell.cell_contents, name, name, todo.depth + 1, file, 0))
            except ValueError:
                continue  # not bound yet
        for name, default in zip(
            reversed(code.co_varnames[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False
        ):
            self._pending.append(_Todo(default, name, name, todo.depth + 1, file, line))
        for name, item in list(function.__dict__.items()):
            self._add(todo, name, item)

    def _exception(self, todo: _Todo, error: BaseException) -> None:
        traceback = error.__traceback__
        while traceback is not None:
            if is_user_file(traceback.tb_frame.f_code.co_filename):
                self._frame(todo, traceback.tb_frame)
            traceback = traceback.tb_next

    def _frame(self, todo: _Todo, frame: FrameType) -> None:
        for name, item in locals_of(frame):
            self._add(todo, name, item)

    def _add(self, todo: _Todo, name: str, item: Any) -> None:
        if item is None:
            return
        shown, last = (f"{todo.name}.{name}", name) if name else (todo.name, todo.last)
        local = 0 if name else todo.local
        self._pending.append(_Todo(item, shown, last, todo.depth + 1, todo.file, local))


def _shown(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int) else "..."


def _module_of(kind: type) -> str:
    return str(getattr(kind, "__module__", ""))
