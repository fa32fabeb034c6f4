"""Trained weights that cannot learn as they are: two factors of zeros, or a layer whose units are all the same.

The gradient of each factor of a product is the gradient of the product times the other factor. One factor of zeros is a
usual way to begin; with two of them neither ever moves. Units with the same weights and the same gradient stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchmedic.observe.step.tensors import parameters_of

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_MAX_LEAVES = 400
_MAX_SAMPLE = 256  # values of a weight
_MAX_ELEMENTS = 1 << 26  # of a gradient
_MIN_UNITS = 4  # of a layer
_MAX_COLUMNS = 16  # weights of a unit
_ROUNDING = 1e-3  # of the largest gradient, between sums that are taken in another order
_PRODUCTS = frozenset("MmBackward BmmBackward MulBackward AddmmBackward ConvolutionBackward LinearBackward".split())


class ZeroProduct(NamedTuple):
    """An operation that multiplies two weights of zeros, or values computed with them."""

    product: Node
    weights: tuple[torch.Tensor, torch.Tensor]


def note_zero_weights(graph: LossGraph, optimizer: Any) -> None:
    """Look at the weights of a graph whose gradients are there: whether the gradient is 0, and the weight as well.

    With a learning rate of 0, as at the start of a warm-up, a gradient of 0 tells nothing about the next step.
    """
    wanted = {id(tensor) for tensor in parameters_of(optimizer)}
    is_update = _updates(optimizer)
    leaves = [node for node in graph.nodes if node.leaf is not None][:_MAX_LEAVES]
    for node in leaves:
        tensor = node.leaf() if node.leaf is not None else None
        gradient = tensor.grad if tensor is not None and id(tensor) in wanted and _is_readable(tensor) else None
        if tensor is not None and gradient is not None:
            with torch.no_grad():
                still = ~gradient.any()
                node.still = still if is_update else None
                node.zero = still & ~tensor.detach().reshape(-1)[:_MAX_SAMPLE].any()
                node.alike = _are_units_alike(tensor, gradient) if len(tensor) >= _MIN_UNITS else None


def _are_units_alike(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Whether all units of a layer have the same weights and the same gradient, which may be 0 in this step."""
    units, pulls = (each.detach().flatten(1)[:, :_MAX_COLUMNS] for each in (weight, gradient))
    differ = (pulls - pulls[:1]).abs().amax()
    alike: torch.Tensor = (units == units[:1]).all() & (differ <= _ROUNDING * pulls.abs().amax())
    return alike


def _updates(optimizer: Any) -> bool:
    """Whether a learning rate is above 0, as far as that can be told without waiting for a device."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return any(isinstance(rate, torch.Tensor) or rate != 0 for rate in rates)


def _is_readable(tensor: torch.Tensor) -> bool:
    gradient = tensor.grad
    if tensor.dim() < 2 or type(gradient) is not torch.Tensor or tensor.is_meta or not tensor.numel():
        return False
    is_plain = gradient.layout is torch.strided and not gradient.is_complex() and gradient.device == tensor.device
    return is_plain and gradient.numel() <= _MAX_ELEMENTS


def identical_units(graph: LossGraph) -> Iterator[Node]:
    """The weights of layers whose units are all the same. The rows of a table are no units.

    In a first step this may be by chance: where the layer behind has equal weights too, the gradient can be 0 but for
    rounding, and differ from the next step on.
    """
    for node in graph.nodes:
        if node.alike and any(reader.kind in _PRODUCTS or reader.kind == "TBackward" for reader in graph.readers(node)):
            yield node


def lastingly_identical_units(looks: Sequence[LossGraph]) -> list[torch.Tensor]:
    """The weights whose units were the same in each of several looks at a loss, and are pulled in the last one."""
    if len({graph.step for graph in looks}) < 2:
        return []
    before = [{id(node.leaf()) for node in identical_units(graph) if node.leaf is not None} for graph in looks[:-1]]
    last = [node.leaf() for node in identical_units(looks[-1]) if node.leaf is not None and not node.still]
    return [leaf for leaf in last if leaf is not None and all(id(leaf) in earlier for earlier in before)]


def zero_product(graph: LossGraph) -> ZeroProduct | None:
    """The first product of two weights of zeros, each of which has a gradient of 0."""
    zeros = {node.number: node for node in graph.nodes if node.zero}
    if len(zeros) < 2:
        return None
    below: dict[int, frozenset[int]] = {}

    def of(number: int) -> frozenset[int]:
        pending = [number]
        while pending:
            top = pending[-1]
            missing = [later for later in graph.nodes[top].behind if later not in below]
            if missing:
                pending += missing
                continue
            own = frozenset({top} & zeros.keys())
            below[top] = own.union(*(below[later] for later in graph.nodes[top].behind))
            pending.pop()
        return below[number]

    for node in graph.nodes:
        sides = [of(number) for number in node.behind] if node.kind in _PRODUCTS else []
        for left in range(len(sides)):
            for right in range(left + 1, len(sides)):
                pair = [(a, b) for a in sides[left] for b in sides[right] if a != b]
                tensors = [zeros[number].leaf for number in pair[0]] if pair else []
                found = [tensor for one in tensors if one is not None and (tensor := one()) is not None]
                if len(found) == 2 and not any(bool(tensor.any()) for tensor in found):
                    return ZeroProduct(node, (found[0], found[1]))
    return None
