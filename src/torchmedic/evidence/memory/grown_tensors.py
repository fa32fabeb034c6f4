"""One tensor or array that a loop makes longer and longer: `self.queue = torch.cat([self.queue, keys])`.

Also what the failing call of the model was given, in loops that neither load nor update, as when a text is generated:
nobody has counted their turns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.holder import Holder
from torchmedic.evidence.memory.accounting.storages import memory_of
from torchmedic.evidence.memory.attempts import callers_of
from torchmedic.evidence.memory.source.fillers import Filler, assigned_at, traffic_of
from torchmedic.evidence.memory.source.model_call import trained_call
from torchmedic.evidence.memory.source.run_again import is_run_again
from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import callee, last_name, syntax_tree

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


class GrownInput(NamedTuple):
    """A variable or attribute, the line that gives it to the model, and the statement that joins more to it."""

    name: str
    shape: tuple[int, ...]
    call: Filler
    at: Filler


def grown_input(evidence: RaisedEvidence, modules: Iterable[torch.nn.Module]) -> GrownInput | None:
    """The input of the model that grows by itself."""
    frame, call = _call(evidence)
    tree = syntax_tree(frame.file) if frame is not None else None
    if frame is None or call is None or tree is None:
        return None
    wanted = [ast.unparse(each) for each in call.args if isinstance(each, ast.Name | ast.Attribute)]
    for name in wanted:
        values = list(_values_of(name, tree))
        joined = [(node, value) for node, value in values if joins(value, name.rpartition(".")[2])]
        is_cut = any(_is_part_of(name, part) for _, value in values for part in ast.walk(value))
        if not joined or is_cut:
            continue
        filler = Filler(frame.file, joined[0][0], joined[0][1], True)
        shape = _shape(name, frame)
        if shape and is_run_again(filler, evidence.frames, modules):
            return GrownInput(name, shape, Filler(frame.file, call, None, True), filler)
    return None


def _call(evidence: RaisedEvidence) -> tuple[Frame | None, ast.Call | None]:
    """The call of the model that is under way; or the one that backward goes back to."""
    if any(frame.module is not None for frame in evidence.frames):
        callers = callers_of(evidence)
        frame = callers[-1] if callers and callers[-1].is_user else None
        return frame, frame.node if frame is not None and isinstance(frame.node, ast.Call) else None
    frame = evidence.user_frame
    return frame, trained_call(frame) if frame is not None else None


def _values_of(name: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(_is(name, target) for target in node.targets):
            yield node, node.value


def _is(name: str, node: ast.expr) -> bool:
    """Whether an expression means the variable; an attribute has another object before it in its own class."""
    if isinstance(node, ast.Attribute) and "." in name:
        return node.attr == name.rpartition(".")[2]
    return ast.unparse(node) == name


def _is_part_of(name: str, node: ast.AST) -> bool:
    """`x[:, -100:]`, which keeps it short."""
    return isinstance(node, ast.Subscript) and _is(name, node.value)


def _shape(name: str, frame: Frame) -> tuple[int, ...]:
    first, *rest = name.split(".")
    value = frame.lookup(first)
    for attribute in rest:
        value = getattr(value, "__dict__", {}).get(attribute)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
