"""Whether a loss can only be negative: read from its graph, and from the sizes of its terms."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch

from torchmedic.replay.trace.microscope import Microscope, Op, Spot
from torchmedic.replay.trajectory.terms import Term, name_of
from torchmedic.source.live_frames import expressions

_MAX_NODES = 200
_MAX_NODES_TO_DATA = 6
_NOTABLE_TERM = 0.05  # of the largest term of a sum: smaller ones do not decide

_ERRORS = frozenset("MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits".split())
_NEVER_NEGATIVE = frozenset(
    "Abs Exp Exp2 Relu Softplus Sigmoid Softmax Sqrt Norm LinalgVectorNorm Cosh Var Std CdistForward".split()
)
_BOUNDING = frozenset(
    "Sigmoid Softmax LogSoftmax LogSigmoid Tanh Hardtanh Clamp ClampMin ClampMax Minimum Maximum Sin Cos Atan Erf "
    "NativeLayerNorm NativeBatchNorm NativeGroupNorm FusedRmsNorm BinaryCrossEntropy BinaryCrossEntropyWithLogits "
    "ThnnFusedLstmCell MkldnnRnnLayer".split()
)
_LAYERS = frozenset("Addmm Mm Bmm Convolution Embedding".split())
_NEVER_POSITIVE = frozenset(["LogSoftmax", "LogSigmoid"])
_DISTANCES = frozenset(["Abs", "Pow", "Norm", "LinalgVectorNorm", "Mul"])  # of what is a difference
_PASSES_ON = frozenset(
    "Mean Sum View UnsafeView ReshapeAlias Unsqueeze Squeeze Expand Select Slice Gather Index IndexSelect T Transpose "
    "Permute Clone ToCopy Stack Cat Unbind Split MaskedSelect Alias".split()
)


class LossSign(NamedTuple):
    """The sign of what a loss mostly consists of."""

    sign: int  # -1: never positive, 1: never negative, 0: not known
    is_error: bool = False  # it measures how far something is from the data
    op: Op | None = None  # that makes the loss, or turns its sign in the same function
    is_whole: bool = True  # no term was left out because it is small
    is_turned: bool = False  # the operation turns the sign of all that it is given


def sign_of_loss(loss: torch.Tensor, scope: Microscope) -> LossSign:
    """The sign of a loss. The scope has seen the replay that made the loss, and was read."""
    return _Signs(scope).of_loss(loss.grad_fn)


def has_no_lower_bound(loss: torch.Tensor, term: Term, scope: Microscope) -> bool:
    """Whether a term of a loss is never positive, and nothing bounds its size."""
    node: Any = loss.grad_fn
    turns = 1
    for at in term.path:
        name = name_of(node)
        if name in ("Mul", "Div") and len(node.next_functions) > 1:
            turns *= _sign(getattr(node, "_saved_other" if at == 0 else "_saved_self", None))
        elif name == "Neg" or (name == "Sub" and at == 1) or (name == "Rsub" and at == 0):
            turns = -turns
        if name in ("Add", "Sub") and at == 1:
            turns *= _sign(getattr(node, "_saved_alpha", 1))
        node = node.next_functions[at][0]
    return turns * _Signs(scope).of_node(node) < 0 and not _is_bounded(node)


def _is_bounded(node: Any) -> bool:
    """Whether a value is perhaps bounded: what it is made of went through such an operation since the last layer."""
    pending, seen = [node], {node}
    while pending and len(seen) < _MAX_NODES:
        here = pending.pop()
        name = name_of(here)
        if name in _LAYERS:
            continue
        following = [each for each, _ in here.next_functions if each is not None]
        if name in _BOUNDING or (name == "Div" and len(following) > 1):  # divided by its own size
            return True
        pending += [each for each in following if each not in seen]
        seen.update(following)
    return bool(pending)


class _Signs:
    def __init__(self, scope: Microscope) -> None:
        self._scope = scope
        self._left = _MAX_NODES
        self._are_errors = self._is_whole = True
        self._turns: list[Any] = []  # nodes that turn the sign, from the loss on
        self._decisive: Any = None  # the node of the loss, or of the only notable term of its sum

    def of_loss(self, root: Any) -> LossSign:
        self._decisive = root
        sign = self._of(root) if root is not None else 0
        made = self._op(self._decisive)
        if made is None or made.spot is None:
            return LossSign(sign, self._are_errors, is_whole=self._is_whole)
        top = self._decisive
        while top is not None and top not in self._turns and name_of(top) in ("Mul", "Div"):
            top = next((following for following, _ in top.next_functions if following is not None), None)
        # Behind a mean, what is negative may be meant to be: a score, a likelihood. Then the loss lacks a minus.
        turned = self._op(top) if top in self._turns else None
        is_near = turned is not None and turned.spot is not None and _is_near(turned.spot, made.spot)
        is_turned = is_near and name_of(top) not in ("Add", "Sub", "Rsub")
        return LossSign(sign, self._are_errors, turned if is_near else made, self._is_whole, is_turned)

    def _op(self, node: Any) -> Op | None:
        return self._scope.op_of(node) if node is not None else None

    def of_node(self, node: Any) -> int:
        """The sign of what a node computes; 0 where it is not known."""
        return self._of(node)

    def _of(self, node: Any) -> int:
        self._left -= 1
        if node is None or self._left < 0:
            return 0
        name = name_of(node)
        if name in _NEVER_POSITIVE:
            return -1
        if name in _ERRORS:
            return 1
        if name in _NEVER_NEGATIVE or _is_even_power(name, node):
            self._are_errors &= name in _DISTANCES and _is_from_data(node)
            return 1
        if name in ("Neg", "NllLoss", "NllLoss2D", "NllLossNd"):
            self._turns.append(node)
            return -self._of(node.next_functions[0][0])
        if name in ("Add", "Sub", "Rsub"):
            return self._of_sum(node, name)
        if name in ("Mul", "Div"):
            return self._of_product(node)
        if name in _PASSES_ON:
            return self._same_of([following for following, _ in node.next_functions])
        return 0

    def _same_of(self, nodes: list[Any]) -> int:
        """The sign that nodes have in common."""
        signs = {self._of(node) for node in nodes}
        return signs.pop() if len(signs) == 1 else 0

    def _of_sum(self, node: Any, name: str) -> int:
        """The sign of the terms that are not small against the largest."""
        second = _sign(getattr(node, "_saved_alpha", 1)) * (-1 if name == "Sub" else 1)
        factors = [-1, 1] if name == "Rsub" else [1, second]
        terms = [(following, factor) for (following, _), factor in zip(node.next_functions, factors, strict=False)]
        op = self._op(node)
        sizes = [self._scope.magnitude(value) for value in op.inputs] if op is not None else []
        if len(sizes) == len(terms):
            bound = _NOTABLE_TERM * max(sizes)
            self._is_whole &= min(sizes) >= bound
            terms = [term for term, size in zip(terms, sizes, strict=True) if size >= bound]
        else:  # a number is added
            terms = [term for term in terms if term[0] is not None]
        if any(factor < 0 for _, factor in terms):
            self._turns.append(node)
        elif node is self._decisive and len(terms) == 1:
            self._decisive = terms[0][0]
        signs = {factor * self._of(following) for following, factor in terms}
        return signs.pop() if len(signs) == 1 else 0

    def _of_product(self, node: Any) -> int:
        left, right = (*node.next_functions, (None, 0))[:2]
        if left[0] is not None and left == right:
            self._are_errors &= _is_from_data(node)
            return 1  # a value times itself
        if left[0] is not None and right[0] is not None:
            return self._of(left[0]) * self._of(right[0])
        inner, constant = (left[0], "_saved_other") if left[0] is not None else (right[0], "_saved_self")
        sign = _sign(getattr(node, constant, None))
        if sign < 0:
            self._turns.append(node)
        return sign * self._of(inner)


def _is_near(spot: Spot, loss: Spot) -> bool:
    """Whether an expression turns a sign as its text says, in the function that makes the loss."""
    if (spot.file, spot.function) != (loss.file, loss.function):
        return False
    if spot.column is None or spot.end_line is None or spot.end_column is None:
        return False
    span = (spot.line, spot.column, spot.end_line, spot.end_column)
    return any(isinstance(node, ast.UnaryOp | ast.BinOp) for node in expressions(spot.file).get(span, ()))


def _is_from_data(node: Any) -> bool:
    """Whether a value is, but for factors, the difference from a tensor that is not trained."""
    for _ in range(_MAX_NODES_TO_DATA):
        name = name_of(node)
        nodes = [following for following, _ in node.next_functions if following is not None]
        if name in ("Sub", "Add"):
            return len(nodes) == 1 or any(_is_from_data(each) for each in nodes)
        if not nodes:
            return False
        node = nodes[0]
    return False


def _is_even_power(name: str, node: Any) -> bool:
    exponent = getattr(node, "_saved_exponent", None) if name == "Pow" else None
    return isinstance(exponent, int | float) and exponent % 2 == 0


def _sign(value: Any) -> int:
    """The sign that all elements have; 0 where they differ."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 0 or value.is_complex():
            return 0
        low, high = float(value.detach().min()), float(value.detach().max())
        return 1 if low >= 0 else -1 if high <= 0 else 0
    return (value > 0) - (value < 0) if isinstance(value, int | float) else 0
