"""Big products of invented numbers, not computed: only their shape and dtype can matter, and a backward through them.

A shadow of a large model would spend nearly all of its time here, on values that mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_WORK = 50_000_000  # multiplications that are still done
_PRODUCTS = frozenset(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh rnn_relu bilinear".split()
)

Noise = Callable[[torch.Size, torch.dtype], torch.Tensor]


class _Pretended(torch.autograd.Function):
    """Depends on its inputs as far as autograd can tell."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zeros = (torch.zeros((), dtype=dtype, device="cpu").expand(shape) for shape, dtype in ctx.shapes)
        return (None, *zeros)


_apply: Callable[..., torch.Tensor] = _Pretended.apply


def is_big_product(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an operation is a product that would take long."""
    if getattr(func, "__name__", "") not in _PRODUCTS or len(tensors) < 2:
        return False
    sizes = sorted((tensor.numel() for tensor in tensors), reverse=True)
    return bool(sizes[0] * max(1.0, sizes[1] ** 0.5) > _WORK)


def pretend(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], noise: Noise) -> Any:
    """What an operation would return, but for its values."""

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    with torch.no_grad():
        shaped = func(
            *tree_map_only(torch.Tensor, without_values, args), **tree_map_only(torch.Tensor, without_values, kwargs)
        )
    inputs = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]

    def with_values(tensor: torch.Tensor) -> torch.Tensor:
        value = noise(tensor.shape, tensor.dtype)
        made: torch.Tensor = _apply(value, *inputs) if inputs and torch.is_grad_enabled() else value
        return made

    return tree_map_only(torch.Tensor, with_values, shaped)
