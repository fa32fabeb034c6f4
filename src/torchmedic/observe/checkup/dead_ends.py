"""Operations through which no gradient can pass, because of the values or the shapes that they were given.

A layer norm over one value is constant, and so is a clamp whose lower bound is above the upper bound: the graph of the
first step shows it. A difference or a ratio of two equal
tensors is constant, and its gradients cancel. A product with zeros passes no gradient to its other factor. Such nodes
do not save what they were given, so the step is run once more, and each operation is looked at while it runs. That is
done only after a trained weight had a gradient of exactly 0 in each of several steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_aten = torch.ops.aten
_COMBINING = {_aten.sub.Tensor: "difference", _aten.rsub.Tensor: "difference", _aten.div.Tensor: "ratio"}
_LOSSES = (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.huber_loss.default)
_MATRICES = {_aten.mm.default: (0, 1), _aten.bmm.default: (0, 1), _aten.addmm.default: (1, 2)}  # the factors
_MAX_SHIFTED = 64  # results that are a tensor plus a number
_MAX_ELEMENTS = 1 << 26


class DeadEnd(NamedTuple):
    """The inputs to which an operation passes no gradient, by their positions, and why.

    `kind` is "equal" for two sides whose gradients cancel, "same" for a loss whose two sides do not differ,
    "one value" for a norm, "bounds" for a clamp, "dropped" for a dropout of everything, "zeros" for a product, and
    "state" for one step of a recurrent layer
    that begins with zeros.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...] = ()  # of the zeros


class DeadEnds(TorchDispatchMode):
    """Finds them while a step runs; by the number of the node that autograd made for the operation.

    Args:
        unmoved: The weights whose gradient was exactly 0 in each of several steps.
    """

    def __init__(self, unmoved: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unmoved = unmoved
        self.found: dict[int, DeadEnd] = {}
        self._operations: dict[int, str] = {}
        self._shifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor plus a number, and the tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number = int(_get_sequence_nr()) - 1
        dead = self._dead_end(func, args)
        result = func(*args, **(kwargs or {}))
        if dead is not None and torch.is_grad_enabled():
            self.found.setdefault(number, dead)
            self._operations[number] = func._schema.name.removeprefix("aten::").replace("_", "")
        if func in (_aten.add.Tensor, _aten.add.Scalar) and isinstance(result, torch.Tensor):
            self._note_shift(args, result)
        return result

    def of(self, graph: LossGraph) -> dict[int, DeadEnd]:
        """The dead ends of a graph. An operation without a node has the number of the node before."""
        made = {number: graph.made(number) for number in self.found}
        kinds = {number: node.kind.lower() for number, node in made.items() if node is not None}
        return {
            number: self.found[number]
            for number, kind in kinds.items()
            if kind == self._operations[number] + "backward"
        }

    def _note_shift(self, args: tuple[Any, ...], result: torch.Tensor) -> None:
        """A margin is added to one of two distances before the other is subtracted."""
        is_shift = len(args) > 1 and (not isinstance(args[1], torch.Tensor) or not args[1].dim())
        if is_shift and isinstance(args[0], torch.Tensor) and len(self._shifted) < _MAX_SHIFTED:
            self._shifted[result.data_ptr()] = (result, args[0])

    def _dead_end(self, func: Any, args: tuple[Any, ...]) -> DeadEnd | None:
        if func in _COMBINING or func in _LOSSES:
            left, right = args[:2]
            if not (_is_readable(left) and _is_readable(right)) or left.shape != right.shape:
                return None
            if _COMBINING.get(func) == "difference":
                left, right = (self._shifted.get(each.data_ptr(), (each, each))[1] for each in (left, right))
            is_equal = torch.equal(left, right) and bool(left.any())
            kind = "equal" if func in _COMBINING else "same"
            return DeadEnd(kind, _COMBINING.get(func, "loss"), (0, 1)) if is_equal else None
        if func is _aten.mkldnn_rnn_layer.default and len(args[0]) == 1:  # one step of a layer
            state = args[5]
            is_empty = _is_readable(state) and not bool(state.any())
            return DeadEnd("state", "layer", (2,), (1, *state.shape)) if is_empty else None
        if func in _MATRICES:
            places = _MATRICES[func]
            empty = [place for place in places if _is_readable(args[place]) and not bool(args[place].any())]
            if len(empty) == 1:
                return DeadEnd("zeros", "product", tuple(set(places) - set(empty)), tuple(args[empty[0]].shape))
        return None


def _is_readable(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.is_floating_point()
    return is_plain and not value.is_meta and 0 < value.numel() <= _MAX_ELEMENTS


def constant(kind: str, raw: Any, layer: torch.nn.Module | None) -> DeadEnd | None:
    """For the node of a norm over one value, of a clamp without a range, of a dropout: its input has no effect."""
    if kind in ("MulBackward", "NativeDropoutBackward") and isinstance(layer, _DropoutNd):
        return DeadEnd("dropped", "dropout", (0,)) if layer.training and layer.p >= 1 else None
    if kind == "ClampBackward":
        low, high = raw._saved_min, raw._saved_max
        is_empty = all(isinstance(bound, float | int) for bound in (low, high)) and low > high
        return DeadEnd("bounds", "clamp", (0,)) if is_empty else None
    if kind == "NativeLayerNormBackward" and math.prod(raw._saved_normalized_shape) == 1:
        return DeadEnd("one value", "layer norm", (0,))
    if kind == "NativeGroupNormBackward" and raw._saved_C // raw._saved_group * raw._saved_HxW == 1:
        return DeadEnd("one value", "group norm", (0,))
    return None


def unmoved(graphs: Sequence[LossGraph]) -> list[torch.Tensor]:
    """The weights of the last graph whose gradient was exactly 0 in all of these graphs."""
    found: list[dict[int, torch.Tensor]] = []
    for graph in graphs:
        leaves = [(node.leaf, node) for node in graph.nodes if node.still]
        alive = [(tensor, node) for reference, node in leaves if reference and (tensor := reference()) is not None]
        found.append({id(tensor): tensor for tensor, _ in alive})
    return [tensor for key, tensor in found[-1].items() if all(key in each for each in found)] if found else []


def behind(node: Node, dead: DeadEnd | None) -> list[int]:
    """The numbers of the nodes that get a gradient from a node."""
    if dead is None or (dead.kind == "equal" and node.missing):
        return node.behind  # nothing cancels where one side has no graph
    return [number for place, number in node.inputs() if place not in dead.inputs]
