"""One tensor or array that a loop makes longer and longer: `self.queue = torch.cat([self.queue, keys])`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.accounting.storages import memory_of
from torchmedic.evidence.memory.source.fillers import Filler, assigned_at, traffic_of
from torchmedic.source.syntax import callee, last_name

if TYPE_CHECKING:
    from torchmedic.evidence.memory.autopsy import Autopsy

JOINS = frozenset("cat concat concatenate hstack vstack row_stack column_stack append".split())
_WITH = frozenset("torch np numpy jnp".split())  # `torch.cat`, but `names.append` is no such call


class Grown(NamedTuple):
    """A name, the bytes behind it, and the statement that joins more to them."""

    holder: Holder
    nbytes: int
    at: Filler


def grown_tensors(autopsy: Autopsy, least: float) -> list[Grown]:
    """Tensors of at least so many bytes that a loop joins more to, the largest first; none that the source cuts."""
    found: dict[int, tuple[Holder, int]] = {}
    for each in autopsy.found:
        if (
            isinstance(each.holder.owner, torch.Tensor)
            and not each.holder.many
            and autopsy.is_wanted(each.tensor.device)
        ):
            for memory in memory_of(each.tensor):
                found.setdefault(memory.key, (each.holder, memory.nbytes))
    for key, (memory, holder) in autopsy.book.held_arrays.items():
        if not holder.many:
            found.setdefault(key, (holder, memory.nbytes))
    large = sorted((each for each in found.values() if each[1] >= least), key=lambda each: -each[1])
    return [
        Grown(holder, nbytes, filler)
        for holder, nbytes in large
        if (filler := _joining(holder)) is not None and not traffic_of(holder).takes
    ]


def _joining(holder: Holder) -> Filler | None:
    name = holder.attribute or holder.path
    return next((each for each in assigned_at(holder) if each.value is not None and joins(each.value, name)), None)


def joins(value: ast.expr, name: str) -> bool:
    """Whether an expression is something joined to what has this name: a variable, or an attribute of anything."""
    return any(any(_names(part, name) for part in each.args[:1]) for each in _joined(value))


def _joined(value: ast.expr) -> Iterator[ast.Call]:
    """The calls that join, through what is called on their results; not through a cut."""
    if isinstance(value, ast.IfExp):  # `k if self.k is None else torch.cat([self.k, k])`
        yield from (*_joined(value.body), *_joined(value.orelse))
    while isinstance(value, ast.Call):
        function = value.func
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        if callee(value) in JOINS and (not owner or owner in _WITH):
            yield value
            return
        if not isinstance(function, ast.Attribute) or owner in _WITH:
            return
        value = function.value


def _names(parts: ast.expr, name: str) -> bool:
    """`[seen, x]`, `(self.queue, k)`, or the first argument of `np.append`."""
    listed = parts.elts if isinstance(parts, ast.List | ast.Tuple) else [parts]
    return any(last_name(each) == name for each in listed)
