"""Two tensors of the same length were broadcast to a table of all pairs.

What: an operation, on tensors or on NumPy arrays, was given shapes [N, 1] and [N]. It paired every element of one with
every element of the other. The result of N x N elements did not fit, or left too little memory for later operations.

Why: a prediction still has its last dimension of size 1 and the target does not (or the other way round). Broadcasting
makes this legal. With a small batch the same line runs and computes a wrong loss.

Cure: bring both tensors to the same shape before the operation, with `.squeeze(-1)` or `.unsqueeze(-1)`.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchmedic.diagnose.cures.memory import add_rewritten
from torchmedic.diagnose.rule import RuleAnswer, rule
from torchmedic.diagnose.rules.memory._table import noticed, table
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.storages import memory_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.fake.ledger import Made, is_about
from torchmedic.evidence.memory.result_sizes import results_of
from torchmedic.records import Location
from torchmedic.replay.step.trial import Edit
from torchmedic.source.live_frames import expressions
from torchmedic.source.spots import Spot, spot_of_node
from torchmedic.source.syntax import nodes_in, syntax_tree

Shape = tuple[int, ...]

_LEAST_SHARE = 8  # a table that takes less than this part of all tensors is not to blame
_PRODUCTS = frozenset({"mm", "matmul", "bmm", "einsum", "dot"})


class _Table(NamedTuple):
    """All pairs of two operands."""

    pair: tuple[Shape, Shape]
    shape: Shape
    nbytes: int


@rule("TM404", "accidental-broadcast")
def check(evidence: RaisedEvidence) -> RuleAnswer | None:
    autopsy = evidence.autopsy
    if autopsy is None:
        return None
    asked = autopsy.asked
    least = max(1 << 20, autopsy.book.everything // _LEAST_SHARE)  # less than that does not fill the memory
    made = [each for each in _tables_of(evidence) if each.nbytes > least]
    if asked is None and made:
        asked = made[0].nbytes
    direct = next(
        (each for each in made if asked and is_about(each.nbytes, asked) and _grew(*each.pair, each.shape)), None
    )
    if (
        direct is None
        and autopsy.failing is not None
        and autopsy.failing.nbytes > least
        and (pair := _pair(autopsy.failing)) is not None
    ):
        direct = _Table(pair, autopsy.failing.shape, autopsy.failing.nbytes)
    if direct is not None:
        frame = evidence.user_frame
        if (frame is not None and _is_meant(frame.node, frame.tree)) or _is_one(evidence):
            return None
        return _said(autopsy, direct, evidence.at_user_line("cause", "stretched here"), _cure(evidence, direct))
    earlier = _earlier(autopsy)
    if earlier is None or earlier.place.spot is None:
        return None
    pair = _pair(earlier)
    assert pair is not None
    label = f"{size(earlier.nbytes)} made here"
    places = (earlier.place.spot.location("cause", label), *noticed(autopsy))
    return _said(autopsy, _Table(pair, earlier.shape, earlier.nbytes), places)


def _said(autopsy: Autopsy, found: _Table, places: tuple[Location, ...], edit: Edit | None = None) -> RuleAnswer:
    one, two = found.pair
    draft = check.draft(autopsy.evidence, "proven")
    draft.message = f"{list(one)} and {list(two)} broadcast to {list(found.shape)}, which takes {size(found.nbytes)}"
    draft.cause = f"both have {math.prod(one)} elements; together they were paired to {math.prod(found.shape)}"
    draft.at(*places)
    draft.because(*table(autopsy))
    plan = None
    if edit is not None:
        shorter = one if len(one) < len(two) else two
        plan = add_rewritten(draft, autopsy, f"bring both to the shape {list(shorter)}", edit)
    else:
        draft.help("bring both to the same shape first, for example with `.squeeze(-1)` or `.unsqueeze(-1)`")
    return RuleAnswer(draft.done(), plan)


def _cure(evidence: RaisedEvidence, found: _Table) -> Edit | None:
    """A column as a row, where the user's own line names it."""
    row, column = sorted(found.pair, key=len)
    call = next((call for call in evidence.calls if call.frame.is_user), None)
    if column[-1] != 1 or column[:-1] != row or call is None:
        return None
    for argument in call.tensors:
        if tuple(argument.value.shape) == column and argument.node is not None:
            plain = isinstance(argument.node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            text = f"{argument.text}.squeeze(-1)" if plain else f"({argument.text}).squeeze(-1)"
            return Edit(spot_of_node(call.frame.file, argument.node, call.frame.function), text)
    return None


def _earlier(autopsy: Autopsy) -> Made | None:
    """A table of pairs that the failing step had made before it ran out."""
    ledger = autopsy.replayed
    least = max(1, autopsy.book.everything, autopsy.measured.used) // _LEAST_SHARE
    tables = [
        each
        for each in (ledger.made if ledger is not None else ())
        if each.nbytes >= least and _pair(each) is not None and not _is_meant(*_expression(each.place.spot))
    ]
    return max(tables, key=lambda each: each.nbytes, default=None)


def _expression(spot: Spot | None) -> tuple[ast.expr | None, ast.AST | None]:
    """The expression of a spot, and the tree of its file."""
    if spot is None or spot.column is None or spot.end_line is None or spot.end_column is None:
        return None, None
    found = expressions(spot.file).get((spot.line, spot.column, spot.end_line, spot.end_column))
    return (found[0] if found else None), syntax_tree(spot.file)


def _is_meant(node: ast.expr | None, tree: ast.AST | None) -> bool:
    """Whether the source itself shows that all pairs are wanted.

    One side is given another dimension, or has kept one, in the expression itself; or the result is put together with a
    product of matrices, as squared distances are: `x.pow(2).sum(1, keepdim=True) + y.pow(2).sum(1) - 2 * x @ y.T`.
    """
    match node:
        case ast.BinOp(left=left, right=right):
            sides = [left, right]
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
        case _:
            return False
    return any(_adds_dimension(side) for side in sides) or _is_beside_product(node, tree)


def _adds_dimension(side: ast.expr) -> bool:
    match side:
        case ast.Call(func=ast.Attribute(attr="unsqueeze")):
            return True
        case ast.Call(keywords=options):
            kept = [each.value for each in options if each.arg in ("keepdim", "keepdims")]
            return any(isinstance(each, ast.Constant) and each.value is True for each in kept)
        case ast.Subscript(slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return any(ast.unparse(part).rpartition(".")[2] in ("None", "newaxis") for part in parts)
    return False


def _is_beside_product(node: ast.expr, tree: ast.AST | None) -> bool:
    """Whether a sum or difference has an expression on one side, and a product of matrices on the other."""
    place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    for outer in nodes_in(tree):
        if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Add | ast.Sub):
            for side, other in ((outer.left, outer.right), (outer.right, outer.left)):
                if (side.lineno, side.col_offset, side.end_lineno, side.end_col_offset) == place:
                    return any(_is_product(each) for each in ast.walk(other))
    return False


def _is_product(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in _PRODUCTS
    return False


def _is_one(evidence: RaisedEvidence) -> bool:
    """Whether both sides are one tensor: that is paired with itself on purpose."""
    for call in evidence.calls:
        storages = {memory.key for each in call.tensors[:2] for memory in memory_of(each.value)}
        if len(call.tensors) >= 2:
            return len(storages) == 1
    return False


def _pair(made: Made) -> tuple[Shape, Shape] | None:
    """Two of an operation's operands that were stretched to what it made."""
    pairs = itertools.combinations([shape for shape in made.inputs if shape], 2)
    return next((pair for pair in pairs if _grew(*pair, made.shape)), None)


def _tables_of(evidence: RaisedEvidence) -> Iterator[_Table]:
    """The results that the running operations would have made of two tensors or arrays."""
    for each in results_of(evidence.calls):
        if len(each.operands) == 2:
            yield _Table((each.operands[0], each.operands[1]), each.shape, each.nbytes)
    for call in evidence.calls:
        arrays = [each.value for each in call.arguments if type(each.value).__name__ == "ndarray"]
        for one, two in itertools.combinations(arrays, 2):
            with contextlib.suppress(RuntimeError, TypeError):
                shape = tuple(torch.broadcast_shapes(one.shape, two.shape))
                nbytes = math.prod(shape) * max(one.itemsize, two.itemsize)
                yield _Table((tuple(one.shape), tuple(two.shape)), shape, nbytes)


def _grew(one: tuple[int, ...], two: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Two of the same number of elements and a different number of dimensions, as [N, 1] and [N] are."""
    if not one or not two or len(one) == len(two) or math.prod(one) != math.prod(two):
        return False
    try:
        together = tuple(torch.broadcast_shapes(one, two))
    except RuntimeError:
        return False
    return together == tuple(shape) and math.prod(shape) >= 16 * math.prod(one)
