"""Names by which the user knows what holds memory: a variable, the attributes and keys on the way, a container."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.linked_pieces import Edge, same_edge
from torchmedic.source.objects.parts import is_users
from torchmedic.source.objects.plain_objects import Pile


class Holder(NamedTuple):
    """A name that leads to tensors: `losses`, `self.memory`, `stats['loss']`."""

    path: str
    owner: Any  # the container or object itself; the tensor where a variable holds it directly
    file: str  # of the code that knows the path's first name
    function: str  # "" for a global
    scope: Any  # the frame's code, or the module
    in_frame: bool  # a variable of a frame that the exception left
    parent: Any = None  # the object whose attribute it is
    attribute: str = ""
    many: bool = False  # one of many in a container: what is in it has no name of its own
    local: int = 0  # first line of the function whose variable it is
    via: str = ""  # as in `Held`: the attribute from one link of a chain to the next, or `cache`
    edges: Edge | None = None  # attributes on the way here


class Found(NamedTuple):
    tensor: torch.Tensor
    holder: Holder


class FoundArray(NamedTuple):
    """Memory of a NumPy array."""

    address: int
    nbytes: int
    holder: Holder


class FoundPile(NamedTuple):
    """Python objects in a container, or one large text."""

    pile: Pile
    holder: Holder


def within(holder: Holder, owner: Any) -> Holder:
    return holder if holder.many else holder._replace(owner=owner, many=True)


def position_of(holder: Holder, owner: Any, position: int, item: Any) -> Holder:
    """The holder of an item of a tuple. Tuples nested in tuples count as the links of one chain."""
    linked, edges = _linked(holder, owner, str(position))
    return linked or holder._replace(path=f"{holder.path}[{position}]", owner=item, edges=edges)


def _linked(holder: Holder, owner: Any, attribute: str) -> tuple[Holder | None, Edge]:
    """The holder of the whole chain if the same attribute was met on the way here, else None; and the way so far."""
    edge = same_edge(holder.edges, type(owner), attribute)
    if edge is not None:
        link = edge if isinstance(owner, torch.Tensor) else owner  # no tensor stands for all of them
        whole: Holder = edge.owner
        return whole._replace(many=True, via=attribute, owner=link, edges=holder.edges), edge
    return None, Edge(type(owner), attribute, holder, holder.edges)


def attribute_of(holder: Holder, owner: Any, name: str, item: Any) -> Holder:
    if holder.many:
        return holder
    linked, edges = _linked(holder, owner, name)
    if linked is not None:
        return linked
    path = f"{holder.path}.{name}"
    if not is_users(type(owner)) and not isinstance(owner, torch.nn.Module | torch.Tensor | threading.local):
        return holder._replace(path=path, owner=item, edges=edges)  # the user's code reaches it through its owner
    return holder._replace(path=path, owner=item, parent=owner, attribute=name, edges=edges)
