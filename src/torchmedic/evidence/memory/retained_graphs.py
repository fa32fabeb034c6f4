"""Graphs of earlier steps that are still held: by which name, how many tensors, how many nodes and bytes.

A graph keeps everything that its nodes have saved until a backward has been through it; after that it keeps only the
nodes themselves. Both are counted, apart from each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch

from torchmedic.evidence.memory.accounting.book import Book
from torchmedic.evidence.memory.accounting.holder import Found, Holder
from torchmedic.evidence.memory.accounting.saved_by_graph import sequence_of, tensors_saved_by, weights_of
from torchmedic.evidence.memory.accounting.storages import memory_of
from torchmedic.evidence.memory.source.differentiated import Backward
from torchmedic.source.objects.graph import is_counted, node_of, walk
from torchmedic.source.user_code import is_user_file

_MIN_SEVERAL = 3  # tensors with a graph in one container, or calls of the model


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """Graphs behind one name. `nbytes` is what they have saved and still have, with the held tensors themselves."""

    holder: Holder
    tensors: int
    nodes: int
    nbytes: int
    own_nbytes: int = 0  # of that, the held tensors themselves: to detach them frees the rest
    is_container: bool
    is_scalar: bool = False  # all of the held tensors have one element
    of_this_step: bool = False  # nothing shows that it is older than that
    is_young: bool = False  # all of it was made since the last update, or nothing was ever updated
    for_nothing: bool = False  # several calls of the model lie behind it, and backward goes through none of them
    outlived: bool = False  # backward has been through all of it but the last part, and it was handed on all the same
    is_of_parts: bool = False  # graphs of many calls of the model, which have little in common but its weights

    @property
    def only_nodes(self) -> bool:
        return self.nbytes < 1 << 20


class _Situation(NamedTuple):
    """The facts that all holders of one failure share; see `retained_graphs`."""

    book: Book
    carried: frozenset[str]
    backward: Backward
    is_differentiated: Callable[[], bool]


class _Group:
    """The tensors with a graph behind one name, and what is known of their age."""

    def __init__(self, members: list[Found], situation: _Situation) -> None:
        book, carried = situation.book, situation.carried
        self.members = members
        self.since = book.since
        self.holder = next((each.holder for each in members if each.holder.via), members[0].holder)
        self.is_older = _is_older(members, book.since)
        self.is_young = book.since == 0 or not self.is_older
        self.is_often = _times_called(members) >= _MIN_SEVERAL
        repeated = self.is_young and self.is_often
        self.for_nothing = repeated and not situation.is_differentiated()
        in_loop = situation.backward == "every turn" and self.holder.path.partition("[")[0] in carried
        self.outlived = repeated and in_loop
        # A loop that neither updates nor loads is all one step to us: a validation, say. Then all in it counts.
        kept = self.for_nothing or self.outlived
        self.of_this_step = kept or (book.since > 0 and _is_collection(members) and not self.is_older)
        self.is_known = book.since > 0 and not self.of_this_step  # nodes before this step are older ones
        self.is_handed_on = kept or (self.holder.path in carried and situation.backward == "never")
        self._is_carried = self.holder.path in carried

    @property
    def is_retained(self) -> bool:
        """Whether the name keeps graphs beyond the step, as far as its kind and age tell."""
        holder = self.holder
        if not self.is_known and not self.is_handed_on and not _is_several(self.members):
            return False
        if holder.in_frame and ((not self.is_known and _is_forward(holder)) or not is_user_file(holder.file)):
            return False
        lasting = not holder.in_frame or self._is_carried or not isinstance(holder.owner, torch.Tensor)
        lasting = lasting or bool(holder.attribute)  # though the last thing that was added to it is of this step
        return not self.is_known or lasting or self.is_older

    def is_counted(self, node: Any) -> bool:
        """Whether a node belongs to what is kept: all of it, or what is older than the step."""
        return not self.is_known or sequence_of(node) < self.since


def retained_graphs(
    found: Iterable[Found],
    book: Book,
    carried: frozenset[str],
    backward: Backward,
    is_differentiated: Callable[[], bool],
) -> list[Retained]:
    """The graphs that outlive their step, the biggest first.

    Args:
        found: Tensors with their holders.
        book: The storages that are accounted for otherwise.
        carried: Names that a loop hands on from one turn to the next.
        backward: Whether that loop goes backward: in every turn, then nothing has to outlive one; or its file does
            somewhere, then what it hands on may be for that.
        is_differentiated: Whether backward may go through what the failing call of the model gives.
    """
    situation = _Situation(book, carried, backward, is_differentiated)
    names: dict[tuple[str, str, str], list[Found]] = {}
    for each in found:
        if node_of(each.tensor) is not None:
            names.setdefault((each.holder.file, each.holder.function, each.holder.path), []).append(each)
    seen: set[Any] = set()
    counted: set[int] = set()
    result = []
    for members in sorted(names.values(), key=lambda members: _rank(members, carried)):
        group = _Group(members, situation)
        retained = _weighed(group, book, seen, counted) if group.is_retained else None
        if retained is not None:
            result.append(retained)
    return sorted(_merged(result), key=lambda each: (-each.nbytes, -each.nodes))


def _weighed(group: _Group, book: Book, seen: set[Any], counted: set[int]) -> Retained | None:
    """The nodes and bytes that a group adds to those `seen` and `counted` before; None if it adds no node."""
    nodes = own_nbytes = 0
    parts = []  # bytes that each of them adds
    for each in sorted(group.members, key=lambda each: -sequence_of(node_of(each.tensor))):
        root = node_of(each.tensor)
        own = _new(each.tensor, book, counted) if group.is_counted(root) else 0
        own_nbytes += own
        for node in walk((root,), seen):
            if is_counted(node) and group.is_counted(node):
                nodes += 1
                own += sum(_new(tensor, book, counted) for tensor in tensors_saved_by(node))
        parts.append(own)
    if not nodes:
        return None
    nbytes = sum(parts)
    return Retained(
        holder=group.holder,
        tensors=len(group.members),
        nodes=nodes,
        nbytes=nbytes,
        own_nbytes=own_nbytes,
        is_container=not isinstance(group.holder.owner, torch.Tensor),
        is_scalar=all(each.tensor.numel() == 1 for each in group.members),
        of_this_step=group.of_this_step,
        is_young=group.is_young,
        for_nothing=group.for_nothing,
        outlived=group.outlived,
        # The newest would lead to nearly all of it, were they steps of one sequence, or heads of one body.
        is_of_parts=group.is_often and len(parts) >= _MIN_SEVERAL and parts[0] <= nbytes // 2,
    )


def _merged(parts: list[Retained]) -> list[Retained]:
    """`acts['a']` and `acts['b']` as `acts`, where neither of them has nearly all of it."""
    families: dict[tuple[str, str, str], list[Retained]] = {}
    for each in parts:
        families.setdefault((each.holder.file, each.holder.function, each.holder.path.partition("[")[0]), []).append(
            each
        )
    result = []
    for (_, _, base), family in families.items():
        top = max(family, key=lambda each: each.nbytes)
        if len(family) == 1 or top.nbytes > 0.7 * sum(each.nbytes for each in family):
            result += family
            continue
        result.append(
            msgspec.structs.replace(
                top,
                holder=top.holder._replace(path=base),
                tensors=sum(each.tensors for each in family),
                nodes=sum(each.nodes for each in family),
                nbytes=sum(each.nbytes for each in family),
                own_nbytes=sum(each.own_nbytes for each in family),
                is_container=True,
                is_scalar=all(each.is_scalar for each in family),
                is_of_parts=all(each.is_of_parts for each in family),
            )
        )
    return result


def _rank(group: list[Found], carried: frozenset[str]) -> tuple[int, int]:
    """Sort key: containers first, then names that are handed on, then names that are merely not yet overwritten."""
    holder = group[0].holder
    container = not isinstance(holder.owner, torch.Tensor)
    return (0 if container else 1 if holder.path in carried or not holder.in_frame else 2, -len(group))


def _times_called(group: list[Found]) -> int:
    """How often the model was called to make what is held: how often its least used parameter was used."""
    uses: Counter[int] = Counter()
    for node in walk((node_of(each.tensor) for each in group), set()):
        uses.update(weights_of(node))
    return min(uses.values(), default=0)


def _is_older(group: list[Found], since: int) -> bool:
    return any(sequence_of(node_of(each.tensor)) < since for each in group)


def _is_collection(group: list[Found]) -> bool:
    holder = group[0].holder
    return _is_several(group) and not isinstance(holder.owner, torch.Tensor) and not _is_forward(holder)


def _is_several(group: list[Found]) -> bool:
    """Whether one container holds several of the tensors, and not the same variable in several calls."""
    return len(group) >= _MIN_SEVERAL and len({id(each.holder.owner) for each in group}) == 1


def _is_forward(holder: Holder) -> bool:
    return holder.function == "forward"


def _new(tensor: torch.Tensor, book: Book, counted: set[int]) -> int:
    nbytes = 0
    for memory in memory_of(tensor):
        under, _ = book.entries.get(memory.key, ("", None))
        if memory.key not in counted and under in ("held", "saved activations", "not traced"):
            counted.add(memory.key)
            nbytes += memory.nbytes
    return nbytes
