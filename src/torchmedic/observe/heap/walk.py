"""What the user's variables hold, by name: how long their containers are, how big their data, how old their graphs.

A walk from the frames on the stack and the modules of the user's code, bounded in time and never repeated often. It
notes numbers and names and keeps no object alive; only what
`observe/heap/growth_watch.py` finds growing is looked at closely.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.heap.key_kinds import keys_of
from torchmedic.observe.heap.library_owned import owners_of_methods
from torchmedic.observe.heap.linked_pieces import ROOT, Branch, Crowds
from torchmedic.source.objects.containers import CONTAINERS, TEXTS, length, pairs
from torchmedic.source.objects.graph import existing_node_of, oldest
from torchmedic.source.objects.parts import Part, cache_of, classes_of, is_users, module_of, parts, parts_of
from torchmedic.source.user_variables import PLAIN, roots

_MOST = 6000  # objects of one walk
_WIDE = 32  # items of a container that are all visited
_DEEP = 9  # names on the way to an object; one that leads to others of its kind counts once
_CELL = 3  # items of a container that may be a link of a chain
_BIG = 1 << 20  # bytes of one tensor, array or text that are worth a note
_MANY = 32  # attributes of an object, which are then something like the items of a container
_FAR = 1000  # items that a container may have, below which nobody asks how big they are
_PLAIN = PLAIN | {torch.dtype, torch.device, torch.Size, CellType}


class Held(NamedTuple):
    """One holder at one moment.

    `kind` says what `size` counts: `items` of a container, `bytes` of a tensor, array or text, or, for a tensor with a
    graph that was made since the last look, `age`: the smallest sequence number that the graph reaches back to. Of
    what stands behind a name in many pieces (the nodes of a linked list or of a tree, lists in a dict) it is `reached`,
    tensors whose graph was there at the last look, or `mass`, bytes of tensors and arrays. `hooks` are those in one
    table of a module, tensor or optimizer.
    """

    name: str  # as the user writes it, seen from where the walk found it
    last: str  # the identifier that the source knows it by: of `self.history["loss"]` it is `history`
    kind: str
    size: int
    file: str  # in which it was found, empty for what several files share
    local: int  # first line of the function whose variable it is, 0 for others
    bounded: bool = False  # by itself, as a deque with a greatest length is, if that is not far away
    old: int = 0  # nodes of its graph that are older than the last look, as far as counted; of `reached`, the oldest
    via: str = ""  # the attribute that leads from one piece to the next, or what fills it: `cache`, `attributes`
    inner: str = ""  # the attribute of one piece under which the tensors were found
    own: str = ""  # the class of a container, where that is the user's
    # `objects`, where it is a dict and its keys are told apart by what they are, not by their value; `lost`, where
    # nobody else has such a key any more, so that it cannot be asked for again.
    keys: str = ""
    most: int = 0  # items that it may have by itself, where that is many
    owners: tuple[str, ...] = ()  # the class of the object that it is an attribute of, and those that it is made from


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
    branch: Branch = ROOT
    owner: type | None = None  # of which `last` is an attribute


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
        self._crowds = Crowds()
        self._seen: set[int] = set()
        self._nodes: set[Any] = set()
        self._pending: deque[_Todo] = deque()

    def run(self, frame: FrameType | None, others: Iterable[Any] = (), most: int | None = None) -> Found:
        """Walk from a frame and those around it.

        Args:
            frame: The innermost.
            others: What need not have a name: it is called by its class.
            most: Objects to look at, if fewer than usual.
        """
        most = most or _MOST
        for file, local, name, value in roots(frame):
            self._pending.append(_Todo(value, name, name, 0, file, local))
        for value in (*owners_of_methods(frame), *others):
            name = type(value).__name__
            self._pending.append(_Todo(value, name, name, 0, "", 0))
        pending, seen = self._pending, self._seen
        while pending and len(seen) < most:
            todo = pending.popleft()
            kind = type(todo.value)
            if kind in _PLAIN:
                continue
            if id(todo.value) in seen:
                self._share(todo)
                continue
            seen.add(id(todo.value))
            with contextlib.suppress(Exception):  # an object of the user's that does not like to be looked at
                self._visit(todo, kind)
        whole = not pending
        pending.clear()
        self._nodes.clear()
        owns = {held.name: held.own for held in self._holders.values() if held.own}
        for crowd in self._crowds.found():
            key = (0, f"{crowd.kind} {crowd.place.name}")
            place = crowd.place
            self._holders[key] = Held(
                *(place.name, place.last, crowd.kind, crowd.size, place.file, place.local),
                old=crowd.oldest,
                via=crowd.via,
                inner=crowd.inner,
                own=owns.get(place.name, ""),
            )
        return Found(self._holders, self._weights, whole)

    def _share(self, todo: _Todo) -> None:
        """Another object has it under the same name."""
        key, owner = (id(todo.value), todo.last), todo.owner
        held = self._holders.get(key) if owner is not None else None
        if owner is not None and held is not None and held.owners and owner.__name__ not in held.owners:
            self._holders[key] = held._replace(owners=(*held.owners, *classes_of(owner)))

    def _visit(self, todo: _Todo, kind: type) -> None:
        value = todo.value
        if issubclass(kind, torch.Tensor):
            self._tensor(todo, kind)
        elif kind in TEXTS:
            self._note(todo, "bytes", TEXTS[kind](value), least=_BIG)
        elif issubclass(kind, CONTAINERS):
            self._container(todo)
        elif issubclass(kind, tuple) and not hasattr(kind, "_fields"):
            self._items(todo, pairs(value, _WIDE), length(value))
        elif kind.__name__ == "ndarray" and module_of(kind) == "numpy":
            nbytes = value.nbytes if value.base is None else 0
            self._crowds.data(todo.branch, nbytes)
            self._note(todo, "bytes", nbytes, least=_BIG)
        elif todo.depth < _DEEP:
            if kind.__name__ == "_lru_cache_wrapper":
                self._cache(todo)
            inside = list(parts(value, kind))
            for part in inside:
                self._follow(todo, part, kind)
            if len(inside) > _MANY and not issubclass(kind, type | torch.nn.Module):
                held = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
                self._note(todo, "items", len(inside), inside=held, via="attributes")

    def _note(
        self,
        todo: _Todo,
        kind: str,
        size: int,
        *,
        least: int = 1,
        bounded: bool = False,
        old: int = 0,
        inside: Any = None,
        via: str = "",
        own: str = "",
        keys: str = "",
        most: int = 0,
    ) -> None:
        if size < least:
            return
        key = (id(todo.value), todo.last) if kind == "items" else (0, f"{kind} {todo.name}")
        if key == self._wanted:
            self.value = todo.value if inside is None else inside
        held = Held(
            *(todo.name, todo.last, kind, size, todo.file, todo.local, bounded, old, via, "", own, keys, most),
            classes_of(todo.owner),
        )
        self._holders.setdefault(key, held)
        if kind != "items":
            return
        # Made anew with a longer one, as in `losses = losses + [loss]`, it is known only by its name.
        before = self._sizes.get(key, self._sizes.get((0, todo.name), size))
        if self._weigh_all or (not bounded and size > before):
            self._weights[key] = self._weigh(todo.value if inside is None else inside)

    def _tensor(self, todo: _Todo, kind: type) -> None:
        tensor = todo.value
        for part in parts_of(tensor, kind):
            self._follow(todo, part, kind)
        if isinstance(tensor, torch.nn.Parameter):
            return
        node = existing_node_of(tensor)
        if node is not None and self._since:
            number = node._sequence_nr()
            if number >= self._since:
                age, old = oldest(node, self._since, self._nodes)
                if age < self._since:
                    self._note(todo, "age", age, least=0, old=old)
            elif todo.branch.share and self._crowds.graph(todo.branch, number) == self._wanted:
                self.value = tensor
        if tensor.layout is torch.strided and kind is torch.Tensor:
            self._crowds.data(todo.branch, tensor.nbytes)
            self._note(todo, "bytes", tensor.untyped_storage().nbytes(), least=_BIG)  # a view grows by no byte

    def _cache(self, todo: _Todo) -> None:
        inside = cache_of(todo.value)
        info = todo.value.cache_info()
        keys = keys_of(inside) if inside is not None else ""
        self._note(
            todo, "items", info.currsize, bounded=info.maxsize is not None, inside=inside, via="cache", keys=keys
        )

    def _container(self, todo: _Todo) -> None:
        value = todo.value
        most = getattr(value, "maxlen", None)
        keys = keys_of(value) if isinstance(value, dict) else ""
        items = pairs(value, _WIDE)
        kind = type(value)
        own = kind.__name__ if kind not in CONTAINERS and is_users(kind) else ""
        bounded = most is not None and most <= _FAR
        self._note(todo, "items", length(value), bounded=bounded, own=own, keys=keys, most=0 if bounded else most or 0)
        if todo.depth < _DEEP:
            self._items(todo, items, length(value), bounded=most is not None)

    def _items(self, todo: _Todo, items: list[tuple[Any, Any]], count: int, *, bounded: bool = False) -> None:
        bounded = bounded or any(item is None for _, item in items)  # of places that are waiting to be filled
        few = count <= len(items)
        for number, (key, item) in enumerate(items):
            if type(item) in _PLAIN:
                continue
            share = 0.0 if bounded else 1.0 if few or number else float(count + 1 - len(items))
            branch, is_new = todo.branch, True
            if count <= _CELL:  # a pair may be a link of a chain
                branch, is_new = branch.along(todo, type(todo.value), str(key), is_key=True)
            elif share != 1.0 or type(key) is not str:
                branch = branch.among_many(todo, share)
            name = f"{todo.name}[{_shown(key)}]" if is_new else todo.name
            depth = todo.depth + is_new
            self._pending.append(_Todo(item, name, todo.last, depth, todo.file, todo.local, branch, todo.owner))

    def _follow(self, todo: _Todo, part: Part, kind: type) -> None:
        name, item, file, line, hidden, hooks = part
        if item is None or type(item) in _PLAIN:
            return
        if hooks:
            whose, _, table = f"{todo.name}.{name}".rpartition(".")
            held = Held(whose, table, "hooks", len(item), todo.file, todo.local, via=table)
            self._holders.setdefault((id(item), "hooks"), held)
        elif file:
            self._pending.append(_Todo(item, name, name, todo.depth + 1, file, line))
        elif not name:
            self._pending.append(todo._replace(value=item, depth=todo.depth + 1))
        else:
            branch, is_new = todo.branch.along(todo, kind, name)
            if issubclass(kind, torch.optim.Optimizer):
                branch = branch._replace(share=0.0)  # its state has as many pieces as the model
            depth = todo.depth + is_new
            shown = f"{todo.name}.{name}" if is_new else todo.name
            last, local, owner = (todo.last, todo.local, todo.owner) if hidden else (name, 0, kind)
            self._pending.append(_Todo(item, shown, last, depth, todo.file, local, branch, owner))


def _shown(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int) else "..."
