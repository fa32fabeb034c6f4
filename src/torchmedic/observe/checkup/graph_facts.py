"""What a graph tells of its numbers: precision, input data, gates that are closed, the loss of an untrained model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import softmaxes_of_one
from torchmedic.observe.checkup.selections import leaves_nothing
from torchmedic.source.objects.graph import name_of

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

# What a first layer was given, if that is no part of the graph: the saved tensor, and where it stands among the inputs.
_GIVEN = {"AddmmBackward": ("_saved_mat1", 1), "ConvolutionBackward": ("_saved_input", 0)}
_MAX_FACTOR = 4.0  # of a first loss over the loss of knowing nothing
_MAX_TERMS = 32  # of a loss
_MAX_ELEMENTS = 1 << 26  # of a tensor that is read
_MAX_COMPARED = 1 << 22  # elements of a tensor that are compared one by one
_MIN_SATURATED = 0.99  # of the values of an activation
_SUMS = frozenset("AddBackward SubBackward RsubBackward".split())
_SCALING = frozenset("MulBackward DivBackward".split())
_LINEAR = frozenset(
    "NegBackward MeanBackward SumBackward ViewBackward SqueezeBackward UnsqueezeBackward CloneBackward ToCopyBackward "
    "AliasBackward StackBackward".split()
)
# Their derivative is 0 wherever there is one.
_FLAT = frozenset(
    "RoundBackward FloorBackward CeilBackward TruncBackward SignBackward NormalBackward BernoulliBackward".split()
)
# These change the precision only if they are told to, or are the user's own.
_ON_PURPOSE = (
    "ToCopy",
    "Mean",
    "Sum",
    "Prod",
    "Cumsum",
    "Cumprod",
    "Softmax",
    "LogSoftmax",
    "LinalgVectorNorm",
    "Norm",
)


def loss_of_knowing_nothing(root: torch.Tensor, classes: int) -> float | None:
    """What a loss that is nothing but a mean cross entropy is if all classes are equally likely; else None.

    That is so whatever the targets are, with weights of classes and with labels that are ignored.
    """
    node: Any = root.grad_fn
    kind = name_of(node).rstrip("0123456789") if node is not None else ""
    if kind in ("NllLossBackward", "NllLoss2DBackward", "NllLoss"):
        return math.log(classes) if node._saved_reduction == 1 and classes > 1 else None
    if kind == "BinaryCrossEntropyWithLogitsBackward" and node._saved_reduction == 1:
        with suppress(RuntimeError):  # freed by an earlier backward pass
            return math.log(2) if node._saved_pos_weight is None and node._saved_weight is None else None
    return None


def first_loss_expected(graph: LossGraph, roots: list[torch.Tensor]) -> float | None:
    """The loss of a model that knows nothing, for a graph of one loss function; None where that is open."""
    number = graph.roots[0].node if len(roots) == 1 else None
    birth = graph.nodes[number].birth if number is not None else None
    call = birth.loss if birth is not None else None
    if call is None or len(call.shape) < 1:
        return None
    return loss_of_knowing_nothing(roots[0], call.shape[1] if len(call.shape) > 1 else call.shape[0])


def largest_given(kind: str, raw: Any) -> torch.Tensor | None:
    """The largest value of the data that a first layer was given; stays on its device."""
    name, position = _GIVEN.get(kind, ("", 0))
    if not name or raw.next_functions[position][0] is not None:
        return None
    given: Any = getattr(raw, name)
    if type(given) is not torch.Tensor or not 0 < given.numel() <= _MAX_ELEMENTS or given.is_meta or given.is_complex():
        return None
    found: torch.Tensor = torch.maximum(given.detach().amax(), -given.detach().amin())
    return found


def is_too_high(graph: LossGraph) -> bool:
    """Whether a first loss is far worse than knowing nothing would be."""
    expected = graph.untrained
    value = graph.roots[0].value if expected is not None else None
    return isinstance(value, float) and expected is not None and value > max(_MAX_FACTOR * expected, expected + 3)


def promotions(graph: LossGraph) -> list[Node]:
    """The nodes at which a graph of smaller precision becomes one of float64, by something that is not part of it."""
    if any(node.leaf is not None and node.dtype is torch.float64 for node in graph.nodes):
        return []
    found: list[Node] = []
    for node in graph.nodes:
        if node.dtype is not torch.float64 or not node.behind:
            continue
        behind = [graph.nodes[number].dtype for number in node.behind]
        if torch.float64 in behind or not any(
            dtype in (torch.float32, torch.float16, torch.bfloat16) for dtype in behind
        ):
            continue
        if node.kind.startswith(_ON_PURPOSE) or not node.kind.endswith("Backward"):
            return []
        found.append(node)
    return found


def activation_of(graph: LossGraph, call: LossCall) -> Node | None:
    """The node that made the values a loss is given, past a reshape and a constant factor of at most 1.

    Such a factor, as of a temperature, makes probabilities even flatter. A larger factor may spread them again.
    """
    node = graph.value_of(graph.made(call.sequence))
    while node is not None and node.factor is not None and 0 < node.factor <= 1:
        node = graph.value_of(graph.nodes[node.behind[0]])
    return node


def may_leave_out_targets(graph: LossGraph, call: LossCall) -> bool:
    """Whether a loss is weighted or selected element by element, so that some of its targets may not count."""
    if call.is_weighted:
        return True
    own = [node for node in graph.nodes if node.birth is not None and node.birth.loss is call]
    pending = [node for node in own[:1] if node.shape != ()]  # the walk comes to the last operation of a call first
    while pending:
        number = pending.pop().number
        for later in graph.nodes:
            if number in later.behind and later.kind not in _LINEAR:
                return True
            if number in later.behind and later.shape != ():
                pending.append(later)
    return False


def signed_kind(kind: str, raw: Any) -> str:
    """The kind of a node: a sum with an `alpha` below 0 is a difference, and the other way round."""
    other = {"AddBackward": "SubBackward", "SubBackward": "AddBackward"}.get(kind, "")
    alpha = getattr(raw, "_saved_alpha", 1) if other else 1
    return other if isinstance(alpha, float | int) and alpha < 0 else kind


def is_mixed(kind: str, raw: Any) -> bool:
    """Whether the sign of a product is not that of its factor with a graph: the other one is 0, or of both signs."""
    other = _other_factor(kind, raw)
    if isinstance(other, torch.Tensor):
        values = _readable(other) if other.is_cpu and other.numel() <= _MAX_COMPARED else None
        return values is not None and (not bool(values.any()) or bool((values < 0).any()))
    return type(other) in (float, int) and not other


def _other_factor(kind: str, raw: Any) -> Any:
    try:
        return raw._saved_other if kind in _SCALING else None
    except RuntimeError:
        return None  # overwritten since


def factor_of(kind: str, raw: Any) -> float | None:
    """The number that a tensor is multiplied by, or whose inverse for a division; None where it is not a number."""
    other = _other_factor(kind, raw)
    if isinstance(other, torch.Tensor):
        if other.dim() or not other.is_cpu or other.is_complex() or other.is_meta:
            return None
        other = other.item()
    if not isinstance(other, float | int) or not other:
        return None
    return float(other) if kind == "MulBackward" else 1 / other


def shape_of_factor(kind: str, raw: Any, position: int) -> tuple[int, ...]:
    """The shape of the factor of a product that is no part of the graph; empty for a number."""
    if kind != "MulBackward":
        return ()
    try:
        factor = raw._saved_other if position else raw._saved_self
    except RuntimeError:
        return ()  # overwritten since
    return tuple(factor.shape) if isinstance(factor, torch.Tensor) else ()


def partial_sums(graph: LossGraph) -> list[Node]:
    """Sums and stacks of single numbers that reach the loss but for a factor, and have a term without a graph.

    Such a term adds nothing to any gradient.
    """
    found: list[Node] = []
    pending = [root.node for root in graph.roots if root.node is not None and root.size == 1]
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        node = graph.nodes[number]
        size = math.prod(node.shape) if node.shape is not None else 0
        if node.kind == "StackBackward" and size == len(node.behind) + len(node.missing):
            found += [node] if node.missing else []
        elif not 0 < size <= _MAX_TERMS:
            continue
        elif node.kind in _SUMS:
            if size > 1:
                continue
            found += [node] if node.missing else []
        elif not is_linear(node):
            continue
        pending += node.behind
    return found


def is_linear(node: Node) -> bool:
    """Whether the result is a sum of what a node is given, but for constant factors."""
    return node.kind in _LINEAR or node.kind in _SUMS or (node.kind in _SCALING and node.missing == [1])


def share_in_double(nodes: Sequence[Node]) -> tuple[int, int]:
    """Values that were computed in float64, and all."""
    sizes = [(node.dtype, math.prod(node.shape)) for node in nodes if node.shape is not None and node.leaf is None]
    return sum(size for dtype, size in sizes if dtype is torch.float64), sum(size for _, size in sizes)


def is_closed(kind: str, raw: Any) -> Any:
    """Whether a gate lets no gradient through; None for what is no gate, or cannot be told."""
    if kind in _FLAT:
        return True
    if kind == "ReluBackward":
        result = _readable(raw._saved_result)
        return None if result is None else result.amax() <= 0
    if kind == "SigmoidBackward":
        result = _readable(raw._saved_result)
        return None if result is None else _is_saturated(result, 0.0)
    if kind == "TanhBackward":
        result = _readable(raw._saved_result)
        return None if result is None else _is_saturated(result, -1.0)
    if kind in ("ClampBackward", "ClampMinBackward", "ClampMaxBackward", "HardtanhBackward"):
        given = _readable(raw._saved_self)
        low = getattr(raw, "_saved_min", getattr(raw, "_saved_min_val", None))
        high = getattr(raw, "_saved_max", getattr(raw, "_saved_max_val", None))
        if given is None or isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
            return None
        closed = [given.amax() < low] if low is not None else []
        closed += [given.amin() > high] if high is not None else []
        return closed[0] if len(closed) == 1 else closed[0] | closed[1] if closed else None
    return leaves_nothing(kind, raw)


def _is_saturated(result: torch.Tensor, low: float) -> Any:
    """Whether nearly every value of a sigmoid or a tanh is exactly a limit: `low` or 1."""
    if result.numel() > _MAX_COMPARED:
        return (result.amin() == 1) | (result.amax() == low)  # needs no more memory
    return ((result == 1) | (result == low)).float().mean() >= _MIN_SATURATED


def _readable(tensor: Any) -> torch.Tensor | None:
    """A saved tensor whose extremes can be computed without more memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not 0 < tensor.numel() <= _MAX_ELEMENTS:
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_complex():
        return None
    found: torch.Tensor = tensor.detach()
    return found


def all_zero(gradients: Iterable[torch.Tensor | None]) -> Any:
    """Whether there are gradients and each of them is 0 everywhere; a tensor where that would have to be waited for."""
    found = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    if not found or any(
        type(gradient) is not torch.Tensor or gradient.layout is not torch.strided for gradient in found
    ):
        return None
    if all(gradient.is_cpu for gradient in found):
        return not any(bool(gradient.any()) for gradient in found)
    if any(gradient.is_cpu or gradient.is_meta for gradient in found):
        return None
    where = found[0].device
    zero = [(gradient.amax() == 0) & (gradient.amin() == 0) for gradient in found if gradient.device == where]
    return torch.stack(zero).all()


def is_stretched(node: Node) -> bool:
    """Whether the result of `a - b` or `a * b` has more dimensions than a side, or elements than both."""
    if len(node.multiplied) == 1 or node.multiplied[1:] == (1,):
        return node.shape is not None and len(node.shape) == 2 and node.shape[0] == node.shape[1] > 1
    operands = node.birth.operands if node.birth is not None else None
    sides = [side for side in operands or () if side is not None and not side.has_gradient and side.shape]
    return node.shape is not None and any(len(side.shape) != len(node.shape) for side in sides)


def is_blocked(graph: LossGraph) -> bool:
    """Whether some operation lets no gradient through."""
    return any(node.closed for node in graph.gates()) or bool(softmaxes_of_one(graph))
