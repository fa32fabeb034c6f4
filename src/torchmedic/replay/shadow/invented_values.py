"""Values for tensors that are lost with their device: right in shape and dtype, plausible, cheap to make.

Big products of such values are not computed: a shadow of a large model would spend nearly all of its time on them. Only
their shape and dtype matter, and a backward through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_BLOCK = 1 << 16  # numbers that are drawn; larger tensors repeat them, in rows that are one in memory
_MAX_MULTIPLICATIONS = 50_000_000  # multiplications of a product that is computed
_PRODUCTS = frozenset(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh rnn_relu bilinear".split()
)

Noise = Callable[[torch.Size, torch.dtype], torch.Tensor]


class Inventor:
    """Makes stand-ins on the CPU, without touching the device of the originals."""

    def __init__(self) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        self._noise = torch.randn(_BLOCK, generator=generator, device="cpu")

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A stand-in. Integers are 0, which is a valid index into everything that is not empty."""
        shape, dtype = tensor.shape, tensor.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype, device="cpu")
        if tensor.dim() < 2:
            return torch.ones(shape, dtype=dtype, device="cpu")
        return self.noise(shape, dtype, max(1, tensor.numel() // max(1, shape[0])) ** -0.5)

    def noise(self, shape: torch.Size, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Numbers around 0, as wide as a layer begins with. The rows of a large tensor are one in memory."""
        count = shape.numel()
        if count <= _BLOCK:
            return (self._noise[:count] * scale).to(dtype).reshape(shape)
        strides, below = [], 1
        for size in reversed(shape):
            strides.append(below if below * size <= _BLOCK else 0)
            below *= size
        return torch.as_strided((self._noise * scale).to(dtype), shape, strides[::-1])


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
    return bool(sizes[0] * max(1.0, sizes[1] ** 0.5) > _MAX_MULTIPLICATIONS)


def pretend(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], noise: Noise) -> Any:
    """The result of an operation, with invented values."""

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
