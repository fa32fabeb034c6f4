"""Values for tensors whose own are lost with their device: right in shape and dtype, plausible, cheap to make."""

from __future__ import annotations

import torch

_BLOCK = 1 << 16  # numbers that are drawn; larger tensors repeat them, in rows that are one in memory


class Inventor:
    """Makes stand-ins on the CPU; none of this touches the device that the originals are on."""

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
