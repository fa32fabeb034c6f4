"""What the user's variables hold, by name: how long their containers are, how big their data, how old their graphs.

The walk starts at the frames on the stack and the modules of the user's code, and visits a bounded number of objects.
It notes numbers and names and keeps no object alive. `observe/heap/growth_watch.py` decides what is looked at closely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.contained import tolerant
from torchmedic.observe.heap.unnamed_objects import owners_of_methods
from torchmedic.source.objects.containers import CONTAINERS, TEXTS, keys_of, length, pairs
from torchmedic.source.objects.graph import existing_node_of, oldest
from torchmedic.source.objects.linked_pieces import LinkedPieces, Visit
from torchmedic.source.objects.parts import (
    Part,
    cache_of,
    classes_of,
    is_users,
    module_of,
    own_dict,
    parts,
    parts_of_tensor,
)
from torchmedic.source.user_variables import PLAIN, roots

_MAX_OBJECTS = 6000  # objects that one walk visits
_MAX_ITEMS = 32  # items of a container that are all visited
_MAX_DEPTH = 9  # names on the way to an object; one that leads to others of its kind counts once
_MAX_LINK_ITEMS = 3  # items of a container that may be a link of a chain
_MIN_BYTES = 1 << 20  # bytes of one tensor, array or text that is worth a note
_MAX_ATTRIBUTES = 32  # attributes of an object; more are something like the items of a container
_MAX_BOUND = 1000  # items of a container with a greatest length, up to which the container counts as bounded
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
    keys: str = ""  # of a dict: see `keys_of`
    most: int = 0  # items that it may have by itself, where that is many
    owners: tuple[str, ...] = ()  # the class of the object that it is an attribute of, and those that it is made from


class Found(NamedTuple):
    """The result of a walk: the holders by key, the items of those that grew, and whether it saw everything."""

    holders: dict[tuple[int, str], Held]
    weights: dict[tuple[int, str], Any]
    whole: bool


class Walk:
    """One walk.

    Args:
        since: The sequence number at the last walk. A graph that is no older is no leak.
        sizes: Sizes of the holders that the last walk found; the items of holders that have grown are weighed.
        weigh: Weighs a container.
        wanted: The holder whose value is kept in `value`.
        weigh_all: Whether to weigh also holders that have not grown.
        graphs: Takes the holder of every tensor that has a graph, by the sequence number of its node.
    """

    def __init__(
        self,
        since: int,
        sizes: Mapping[tuple[int, str], int],
        weigh: Callable[[Any], Any],
        wanted: tuple[int, str] | None = None,
        *,
        weigh_all: bool = False,
        graphs: dict[int, Held] | None = None,
    ) -> None:
        self._since = since
        self._wanted = wanted
        self._weigh_all = weigh_all
        self._graphs = graphs
        self.value: Any = None  # of the holder that is wanted
        self._sizes = sizes
        self._weigh = weigh
        self._weights: dict[tuple[int, str], Any] = {}
        self._holders: dict[tuple[int, str], Held] = {}
        self._pieces = LinkedPieces()
        self._seen: set[int] = set()
        self._nodes: set[Any] = set()
        self._pending: deque[Visit] = deque()

    def run(self, frame: FrameType | None, others: Iterable[Any] = (), most: int | None = None) -> Found:
        """Walk from a frame and those around it.

        Args:
            frame: The innermost frame.
            others: Objects that need not have a name: they are called by their class.
            most: Objects to look at, if fewer than usual.
        """
        most = most or _MAX_OBJECTS
        for file, local, name, value in roots(frame):
            self._pending.append(Visit(value, name, name, 0, file, local))
        for value in (*owners_of_methods(frame), *others):
            name = type(value).__name__
            self._pending.append(Visit(value, name, name, 0, "", 0))
        pending, seen = self._pending, self._seen
        with torch._C.DisableTorchFunctionSubclass():  # a subclass of the user's sees nothing of this
            while pending and len(seen) < most:
                visit = pending.popleft()
                kind = type(visit.value)
                if kind in _PLAIN:
                    continue
                if id(visit.value) in seen:
                    self._share(visit)
                    continue
                seen.add(id(visit.value))
                with tolerant:  # an object of the user that raises when it is inspected
                    self._visit(visit, kind)
        whole = not pending
        pending.clear()
        self._nodes.clear()
        owns = {held.name: held.own for held in self._holders.values() if held.own}
        for counted, start, branch, size, old in self._pieces.found():
            self._holders[0, f"{counted} {start.name}"] = Held(
                *(start.name, start.last, counted, size, start.file, start.local),
                old=old,
                via=branch.via,
                inner=branch.inner,
                own=owns.get(start.name, ""),
            )
        self._pieces = LinkedPieces()  # holds objects of the user
        return Found(self._holders, self._weights, whole)

    def _share(self, visit: Visit) -> None:
        """Note that another object has the same holder under the same name."""
        key, owner = (id(visit.value), visit.last), visit.owner
        held = self._holders.get(key) if owner is not None else None
        if owner is not None and held is not None and held.owners and owner.__name__ not in held.owners:
            self._holders[key] = held._replace(owners=(*held.owners, *classes_of(owner)))

    def _visit(self, visit: Visit, kind: type) -> None:
        value = visit.value
        if issubclass(kind, torch.Tensor):
            self._tensor(visit, kind)
        elif kind in TEXTS:
            self._note(visit, "bytes", TEXTS[kind](value), least=_MIN_BYTES)
        elif issubclass(kind, CONTAINERS):
            self._container(visit)
        elif issubclass(kind, tuple) and not hasattr(kind, "_fields"):
            self._items(visit, pairs(value, _MAX_ITEMS), length(value))
        elif kind.__name__ == "ndarray" and module_of(kind) == "numpy":
            nbytes = value.nbytes if value.base is None else 0
            self._pieces.add_data(visit.branch, nbytes)
            self._note(visit, "bytes", nbytes, least=_MIN_BYTES)
        elif visit.depth < _MAX_DEPTH:
            if kind.__name__ == "_lru_cache_wrapper":
                self._cache(visit)
            inside = list(parts(value, kind))
            for part in inside:
                self._follow(visit, part, kind)
            if len(inside) > _MAX_ATTRIBUTES and not issubclass(kind, type | torch.nn.Module):
                self._note(visit, "items", len(inside), inside=own_dict(value, kind), via="attributes")

    def _note(
        self,
        visit: Visit,
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
        key = (id(visit.value), visit.last) if kind == "items" else (0, f"{kind} {visit.name}")
        if key == self._wanted:
            self.value = visit.value if inside is None else inside
        held = Held(
            *(visit.name, visit.last, kind, size, visit.file, visit.local, bounded, old, via, "", own, keys, most),
            classes_of(visit.owner),
        )
        self._holders.setdefault(key, held)
        if kind != "items":
            return
        # Made anew with a longer one, as in `losses = losses + [loss]`, it is known only by its name.
        before = self._sizes.get(key, self._sizes.get((0, visit.name), size))
        if self._weigh_all or (not bounded and size > before):
            self._weights[key] = self._weigh(visit.value if inside is None else inside)

    def _tensor(self, visit: Visit, kind: type) -> None:
        tensor = visit.value
        for part in parts_of_tensor(tensor, kind):
            self._follow(visit, part, kind)
        if isinstance(tensor, torch.nn.Parameter):
            return
        node = existing_node_of(tensor)
        if node is not None and self._graphs is not None:
            held = Held(visit.name, visit.last, "age", 0, visit.file, visit.local, owners=classes_of(visit.owner))
            self._graphs.setdefault(node._sequence_nr(), held)
        if node is not None and self._since:
            number = node._sequence_nr()
            if number >= self._since:
                age, old = oldest(node, self._since, self._nodes)
                if age < self._since:
                    self._note(visit, "age", age, least=0, old=old)
            elif visit.branch.share and self._pieces.add_graph(visit.branch, number) == self._wanted:
                self.value = tensor
        if tensor.layout is torch.strided and kind is torch.Tensor:
            self._pieces.add_data(visit.branch, tensor.nbytes)
            self._note(visit, "bytes", tensor.untyped_storage().nbytes(), least=_MIN_BYTES)  # a view adds no byte

    def _cache(self, visit: Visit) -> None:
        inside = cache_of(visit.value)
        info = visit.value.cache_info()
        keys = keys_of(inside) if inside is not None else ""
        self._note(
            visit, "items", info.currsize, bounded=info.maxsize is not None, inside=inside, via="cache", keys=keys
        )

    def _container(self, visit: Visit) -> None:
        value = visit.value
        most = getattr(value, "maxlen", None)
        keys = keys_of(value) if isinstance(value, dict) else ""
        items = pairs(value, _MAX_ITEMS)
        kind = type(value)
        own = kind.__name__ if kind not in CONTAINERS and is_users(kind) else ""
        bounded = most is not None and most <= _MAX_BOUND
        self._note(visit, "items", length(value), bounded=bounded, own=own, keys=keys, most=0 if bounded else most or 0)
        if visit.depth < _MAX_DEPTH:
            self._items(visit, items, length(value), bounded=most is not None)

    def _items(self, visit: Visit, items: list[tuple[Any, Any]], count: int, *, bounded: bool = False) -> None:
        bounded = bounded or any(item is None for _, item in items)  # places that wait to be filled
        few = count <= len(items)
        for number, (key, item) in enumerate(items):
            if type(item) in _PLAIN:
                continue
            share = 0.0 if bounded else 1.0 if few or number else float(count + 1 - len(items))
            branch, is_new = visit.branch, True
            if count <= _MAX_LINK_ITEMS:  # a pair may be a link of a chain
                branch, is_new = branch.along(visit, type(visit.value), str(key), is_key=True)
            elif share != 1.0 or type(key) is not str:
                branch = branch.among_many(visit, share)
            name = f"{visit.name}[{_shown(key)}]" if is_new else visit.name
            depth = visit.depth + is_new
            self._pending.append(Visit(item, name, visit.last, depth, visit.file, visit.local, branch, visit.owner))

    def _follow(self, visit: Visit, part: Part, kind: type) -> None:
        name, item, code, line, hidden, hooks = part
        if item is None or type(item) in _PLAIN:
            return
        if hooks:
            whose, _, table = f"{visit.name}.{name}".rpartition(".")
            held = Held(whose, table, "hooks", len(item), visit.file, visit.local, via=table)
            self._holders.setdefault((id(item), "hooks"), held)
        elif code is not None:
            self._pending.append(Visit(item, name, name, visit.depth + 1, code.co_filename, line))
        elif not name:
            self._pending.append(visit._replace(value=item, depth=visit.depth + 1))
        else:
            branch, is_new = visit.branch.along(visit, kind, name)
            if issubclass(kind, torch.optim.Optimizer):
                branch = branch._replace(share=0.0)  # its state has as many pieces as the model
            depth = visit.depth + is_new
            shown = f"{visit.name}.{name}" if is_new else visit.name
            last, local, owner = (visit.last, visit.local, visit.owner) if hidden else (name, 0, kind)
            self._pending.append(Visit(item, shown, last, depth, visit.file, local, branch, owner))


def _shown(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int) else "..."
