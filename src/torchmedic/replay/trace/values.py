"""Values of tensors, read only where that is safe, and said in few words.

Only dense tensors in host memory are read. A value on a device would have to be waited for, perhaps for ever; a fake,
meta or wrapped tensor has none.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_MAX_ELEMENTS = 100_000_000  # about a tenth of a second to look through
_MAX_SHOWN = 4


def readable(value: Any) -> torch.Tensor | None:
    """The values of a tensor as a plain tensor; None where they cannot be read safely."""
    try:
        while isinstance(value, torch.Tensor) and torch._C._functorch.is_gradtrackingtensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or value.is_quantized:
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.numel() > _MAX_ELEMENTS:
            return None
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            plain = value.detach()
            return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)
    except Exception:  # whatever a subclass of the user's does when it is looked at
        return None


class Strays:
    """The elements of a tensor that should not be as they are."""

    def __init__(self, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.total = tensor.numel()
        self.count = int(mask.sum())
        positions = mask.nonzero()[:1024]
        self.positions: list[tuple[int, ...]] = [tuple(row) for row in positions.tolist()]
        self.values: list[Any] = tensor[mask][:1024].tolist()

    @property
    def distinct(self) -> list[Any]:
        """The values themselves, the most frequent first."""
        return [value for value, _ in Counter(self.values).most_common()]

    @property
    def listed(self) -> str:
        """`10`, or `-1 (12 times), 255 (3 times)`."""
        counts = Counter(self.values).most_common()
        if len(counts) == 1:
            return number(counts[0][0])
        shown = ", ".join(
            number(value) + (f" ({count} times)" if count > 1 else "") for value, count in counts[:_MAX_SHOWN]
        )
        return shown + (", ..." if len(counts) > _MAX_SHOWN else "")

    def at(self, name: str = "") -> str:
        """The first position as the user would write it: `labels[17]`, `[2, 40]`."""
        place = ", ".join(str(part) for part in self.positions[0])
        return f"{name}[{place}]" if place else name


def outside(tensor: torch.Tensor, low: float, high: float, ignored: int | None = None) -> Strays | None:
    """Elements below `low`, at or above `high`, or not a number; those equal to `ignored` do not count."""
    try:
        mask = ~((tensor >= low) & (tensor < high))
        if ignored is not None:
            mask &= tensor != ignored
        return Strays(tensor, mask) if bool(mask.any()) else None
    except Exception:
        return None


def where(tensor: torch.Tensor, mask: torch.Tensor) -> Strays | None:
    """Elements under a mask of the same shape."""
    try:
        return Strays(tensor, mask) if mask.shape == tensor.shape and bool(mask.any()) else None
    except Exception:
        return None


def span(tensor: torch.Tensor) -> tuple[Any, Any] | None:
    """The smallest and the largest value; None of an empty tensor."""
    if tensor.numel() == 0:
        return None
    low, high = tensor.aminmax()
    return low.item(), high.item()


def number(value: Any) -> str:
    """A number in few digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor can serve as an index."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
