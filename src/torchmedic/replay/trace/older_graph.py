"""Which tensor brings a graph into the step that is older than the step, and which variable holds it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_iter

from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.objects.containers import items
from torchmedic.source.objects.graph import following, is_counted, is_freed, nodes_behind, walk
from torchmedic.source.objects.parts import attributes
from torchmedic.source.spots import spot_of_frame
from torchmedic.source.syntax import is_module
from torchmedic.source.user_code import is_user_file

_CONTAINERS = (list, tuple, dict, deque)
_PLAIN = (str, bytes, int, float, bool, type(None))
_OF_MODULES = frozenset({"_buffers", "_modules", "_parameters"})
_MAX_OBJECTS = 400
_MAX_ATTRIBUTES = 200  # attributes of one object
_MAX_ITEMS = 256  # items of one container, the last ones


class GraphHolder(NamedTuple):
    """A variable that holds a tensor: `h`, `self.hidden`, `losses` (one of its items)."""

    name: str
    owner: Any  # the object whose attribute it is; None for a plain variable
    is_item: bool
    spot: Spot  # where its frame was at that moment
    is_local: bool  # seen from a function that was running, not from the step's own frame
    is_passing: bool  # a variable of that function's own: it was given its value in this step
    key: Any = None  # of an item of a dict


class Import(NamedTuple):
    """A tensor that was there before the step, with its graph."""

    tensor: torch.Tensor
    holders: tuple[GraphHolder, ...]  # innermost frame first

    def is_spent(self, failed: int) -> bool:
        """Whether an earlier backward has freed its graph, or a replay has put the tensor in place of such a tensor.

        Args:
            failed: The sequence number at the failure. What the step leaves behind, its replays leave behind anew.
        """
        node: Any = self.tensor.grad_fn
        return node._sequence_nr() >= failed or any(is_freed(part) for part in walk([node]))


class Imports(Provenance):
    """Notes the tensors that a replay finds there with a graph, and who holds them at the moment of their use.

    Args:
        file: The file that the segment was cut from: its statements run in a frame of their own.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file
        self._start = _get_sequence_nr()
        self._imports: dict[int, tuple[Any, Import]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and self.is_old(value) and id(value) not in self._imports:
                found = Import(value, tuple(_holders(value, sys._getframe(1), self._file)))
                self._imports[id(value)] = (value.grad_fn, found)
        return super().__torch_function__(func, types, args, kwargs)

    def is_old(self, tensor: torch.Tensor) -> bool:
        """Whether the graph of a tensor was there before the replay."""
        return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() < self._start

    def edges_since(self, roots: Iterable[torch.Tensor]) -> int:
        """The number of edges behind some roots on ways to weights, in what was made since this replay began."""
        new = [node for node in nodes_behind(roots) if node._sequence_nr() >= self._start]
        leading: set[Any] = set()  # nodes on such a way
        edges = 0
        for node in sorted(new, key=lambda node: node._sequence_nr()):  # each after the nodes behind it
            behind = [after for after in following(node) if after in leading or not is_counted(after)]
            edges += len(behind)
            if behind:
                leading.add(node)
        return edges

    def behind_roots(self, roots: Iterable[torch.Tensor], frame: FrameType) -> list[Import]:
        """The old tensors behind some roots; a root that is old itself gets the variables of a frame."""
        roots = list(roots)
        nodes = nodes_behind(roots)
        found = [noted for node, noted in self._imports.values() if node in nodes]
        for root in roots:
            if self.is_old(root) and id(root) not in self._imports:
                found.append(Import(root, tuple(named(root, frame, spot_of_frame(frame), is_local=False))))
        return found


def _holders(tensor: torch.Tensor, frame: FrameType | None, file: str) -> Iterator[GraphHolder]:
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            step = is_module(code) and code.co_filename == file
            yield from named(tensor, frame, spot_of_frame(frame), is_local=not step)
            if step:
                return
        frame = frame.f_back


def named(tensor: torch.Tensor, frame: FrameType, spot: Spot, *, is_local: bool) -> Iterator[GraphHolder]:
    """The variables of a frame that are or hold a tensor; plain ones first, then attributes, then global ones."""
    code = frame.f_code
    variables = dict(frame.f_locals)
    if frame.f_globals is not frame.f_locals:
        variables |= {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
    else:  # a statement of the step: names that the statement itself reads come first
        variables = dict(sorted(variables.items(), key=lambda item: item[0] not in code.co_names))
    own = frozenset(code.co_varnames) | frozenset(code.co_cellvars) if is_local else frozenset()
    for is_item in (False, True):
        for name, value in variables.items():
            if not is_item and value is tensor:
                yield GraphHolder(name, None, False, spot, is_local, name in own)
            elif is_item and isinstance(value, _CONTAINERS) and _contains(value, tensor):
                yield GraphHolder(name, None, True, spot, is_local, name in own, _key(value, tensor))
    seen: set[int] = set()
    for name, value in variables.items():
        yield from _attributes(tensor, name, value, spot, is_local, seen, 3)


def _attributes(
    tensor: torch.Tensor, name: str, owner: Any, spot: Spot, is_local: bool, seen: set[int], depth: int
) -> Iterator[GraphHolder]:
    """The attributes of an object of the user's, and of the objects that it holds, that are or hold a tensor."""
    kind = type(owner)
    if (
        issubclass(kind, (torch.Tensor, type, ModuleType, *_CONTAINERS))
        or id(owner) in seen
        or len(seen) > _MAX_OBJECTS
    ):
        return
    seen.add(id(owner))
    found = attributes(owner, kind)[:_MAX_ATTRIBUTES]
    if isinstance(owner, torch.nn.Module):
        found += [*owner._buffers.items(), *owner._modules.items()]
    inner = []
    for attribute, held in found:
        path = f"{name}.{attribute}"
        if held is tensor:
            yield GraphHolder(path, owner, False, spot, is_local, False)
        elif isinstance(held, _CONTAINERS):
            if attribute not in _OF_MODULES and _contains(held, tensor):
                yield GraphHolder(path, owner, True, spot, is_local, False, _key(held, tensor))
        elif not isinstance(held, _PLAIN):
            inner.append((path, held))
    for path, held in inner if depth else ():
        yield from _attributes(tensor, path, held, spot, is_local, seen, depth - 1)


def _key(value: Any, tensor: torch.Tensor) -> Any:
    if not isinstance(value, dict):
        return None
    return next((key for key, item in items(value) if _contains(item, tensor)), None)


def _contains(value: Any, tensor: torch.Tensor, depth: int = 3) -> bool:
    if value is tensor:
        return True
    if not depth or not isinstance(value, _CONTAINERS):
        return False
    return any(_contains(item, tensor, depth - 1) for _, item in items(value)[-_MAX_ITEMS:])
