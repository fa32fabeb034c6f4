"""Whether the graph of the loss reaches back into earlier steps, further and further, and through which variable.

Nodes of a graph are numbered as they are built, so those that were there before the last update are known by their
numbers. Two steps are looked at; only where they show such nodes are there more looks, and after each of these steps
the numbers behind the user's variables are noted, to tell which of them carries the old graph over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr

from torchmedic.source.own_locals import looks_at_locals
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.user_code import is_user_file

_FIRST = (2, 3)
_LATER = frozenset({4, 5, 6, 8, 11, 16, 22})
_NODES = 20_000
_FRAMES = 8
_ATTRIBUTES = 200
_DEPTH = 2  # of objects in objects


class Carried(NamedTuple):
    """A variable that holds a tensor with a graph, and the line of its frame."""

    name: str
    place: Place
    is_attribute: bool


class Growth:
    """Fed by the ledger."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] = []  # step, nodes of earlier steps, nodes
        self.carried: Carried | None = None
        self.backward: Place = NOWHERE
        self._bound = 0  # numbers below it were given before the last update
        self._names: dict[int, Carried] = {}
        self.over = False

    def step_ended(self, frame: FrameType) -> None:
        self._bound = int(_get_sequence_nr())
        self._names = {}
        for number, carried in _holders(frame) if self.sizes and not self.over else ():
            self._names.setdefault(number, carried)  # the innermost

    def backward_begins(self, roots: Iterable[Any], step: int, place: Place) -> None:
        if self.over or not (step in _FIRST or step in _LATER) or (self.sizes and self.sizes[-1][0] == step):
            return
        if step in _LATER and not self.sizes:
            self.over = True
            return
        old, count, edges = self._walk(roots)
        before = self.sizes[-1][1] if self.sizes else 0
        self.over = bool(self.sizes) and (old <= before or step == max(_LATER))
        if old <= before:
            self.sizes.clear()  # it is cut now and then, or stays as it is
            return
        self.sizes.append((step, old, count))
        self.backward = place
        for number in edges:
            self.carried = self._names.get(number, self.carried)

    def _walk(self, roots: Iterable[Any]) -> tuple[int, int, list[int]]:
        """Nodes of earlier steps, all nodes, and those of the former that newer ones lead to."""
        pending = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
        seen: set[Any] = set(pending)
        old = 0
        edges: list[int] = []
        while pending:
            node = pending.pop()
            is_old = _is_old(node, self._bound)
            old += is_old
            for later, _ in node.next_functions:
                if later is None:
                    continue
                if not is_old and _is_old(later, self._bound):
                    edges.append(int(later._sequence_nr()))
                if later not in seen and len(seen) < _NODES:
                    seen.add(later)
                    pending.append(later)
        return old, len(seen), edges


def _is_old(node: Any, bound: int) -> bool:
    return not hasattr(node, "variable") and int(node._sequence_nr()) < bound


def _holders(frame: FrameType | None) -> Iterator[tuple[int, Carried]]:
    """The variables of the user's frames, and attributes of their objects, with the numbers of the nodes behind."""
    for _ in range(_FRAMES if sys.gettrace() is None else 0):  # a debugger writes variables back
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        code = frame.f_code
        optimised = bool(code.co_flags & 1)
        if not (optimised and looks_at_locals(code)):
            values = frame.f_locals
            place = Place(code.co_filename, frame.f_lineno)
            for name, value in list(values.items()):
                yield from _numbers(name, value, place)
            if optimised and sys.version_info < (3, 13):
                values.clear()  # a copy kept by the frame, which would hold every tensor past its time
        frame = frame.f_back


def _numbers(name: str, value: Any, place: Place) -> Iterator[tuple[int, Carried]]:
    for tensor in _tensors(value):
        yield int(tensor.grad_fn._sequence_nr()), Carried(name, place, False)
    if not name.startswith("__"):
        yield from _of_attributes(name, value, _DEPTH)


def _of_attributes(name: str, owner: Any, depth: int) -> Iterator[tuple[int, Carried]]:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, torch.Tensor | type | ModuleType | FunctionType):
        return
    if isinstance(owner, torch.nn.Module):
        attributes = {**attributes, **owner._buffers, **owner._modules}
    file = getattr(sys.modules.get(type(owner).__module__), "__file__", None)
    for attribute, held in list(attributes.items())[:_ATTRIBUTES]:
        for tensor in _tensors(held) if file else ():
            yield int(tensor.grad_fn._sequence_nr()), Carried(f"{name}.{attribute}", Place(str(file), 0), True)
        if depth and not isinstance(held, torch.Tensor):
            yield from _of_attributes(f"{name}.{attribute}", held, depth - 1)


def _tensors(value: Any, depth: int = 2) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
    elif depth and isinstance(value, list | tuple):
        for item in value[-64:]:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in list(value.values())[-64:]:
            yield from _tensors(item, depth - 1)
