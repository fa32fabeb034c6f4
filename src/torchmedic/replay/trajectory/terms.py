"""The terms that a loss adds up, and the numbers that they are multiplied by, read from the graph of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.autograd

from torchmedic.replay.trace.microscope import Microscope, Op

Path = tuple[int, ...]  # from the loss on: which input of each operation is followed
Factor = tuple[Path, float]  # of the gradient that a term gets

_MAX_TERMS = 16
_MAX_DEPTH = 24
_SUMS = ("Add", "Sub", "Rsub")
_PRODUCTS = ("Mul", "Div")
_LINEAR = ("Neg", "Mean", "Sum")


class Term(NamedTuple):
    """One term of a loss."""

    path: Path
    weight: float  # the size of the numbers that it is multiplied by
    op: Op | None  # the outermost product of the term, or what computes it
    size: float = 0.0  # the largest value of the term; 0 where it is not known


def terms_of(loss: torch.Tensor, scope: Microscope) -> list[Term]:
    """The terms of a loss; a loss that is no sum has one. The scope has seen the replay that made it, and was read."""
    return list(_terms(loss.grad_fn, (), 1.0, scope))[:_MAX_TERMS]


def _terms(
    node: Any, path: Path, weight: float, scope: Microscope, product: Op | None = None, size: float = 0.0
) -> Iterator[Term]:
    inputs = [at for at, (following, _) in enumerate(getattr(node, "next_functions", ())) if following is not None]
    name = name_of(node)
    if name in _SUMS and len(path) < _MAX_DEPTH:
        op = scope.op_of(node)
        sizes = [scope.magnitude(value) for value in op.inputs] if op is not None else []
        for at in inputs:
            size = sizes[at] if len(sizes) == len(node.next_functions) else 0.0
            yield from _terms(node.next_functions[at][0], (*path, at), weight, scope, size=size)
    elif name in _PRODUCTS and len(inputs) == 1 and len(path) < _MAX_DEPTH:
        number = scalar(getattr(node, "_saved_other" if inputs[0] == 0 else "_saved_self", None))
        weight = weight * number if name == "Mul" else weight / number
        following, inner = node.next_functions[inputs[0]][0], (*path, inputs[0])
        if name == "Div" or not path:  # the whole loss is multiplied, or a term is divided by its number of elements
            yield from _terms(following, inner, weight, scope, scope.op_of(node) if name == "Mul" else product, size)
        else:  # a sum that is multiplied is one term
            yield Term(inner, weight, scope.op_of(node), size)
    elif node is not None:
        behind = node.next_functions[inputs[0]][0] if name in _LINEAR and len(inputs) == 1 else None
        # The mean of a sum is a sum of means.
        terms = list(_terms(behind, (*path, inputs[0]), weight, scope)) if len(path) < _MAX_DEPTH and behind else []
        yield from terms if len(terms) > 1 else [Term(path, weight, product or scope.op_of(node), size)]


@contextlib.contextmanager
def weakened(factor: Factor | None) -> Iterator[None]:
    """A block in which backward multiplies the gradient of one term of the loss by a factor."""
    if factor is None:
        yield
        return
    path, times = factor
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
        node = _at(roots[0].grad_fn, path) if kwargs.get("accumulate_grad", True) else None
        handle = node.register_prehook(_times(times)) if node is not None else None
        try:
            return run(roots, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()

    engine._engine_run_backward = run_backward
    try:
        yield
    finally:
        engine._engine_run_backward = run


def _at(node: Any, path: Path) -> Any:
    for at in path:
        following = getattr(node, "next_functions", ())
        node = following[at][0] if at < len(following) else None
    return node


def _times(factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    return lambda gradients: tuple(None if gradient is None else gradient * factor for gradient in gradients)


def name_of(node: Any) -> str:
    """`Mul` for a `MulBackward0`."""
    return type(node).__name__.partition("Backward")[0]


def scalar(value: Any) -> float:
    """The size of a factor; 1 where it is not a number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
        value = value.item()
    return abs(float(value)) or 1.0 if isinstance(value, int | float) else 1.0
