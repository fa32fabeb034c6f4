"""Converts live arguments of a call to parts of a recipe: tensors become inputs, other values stay as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Literal

import torch

from torchmedic.repro.recipe import RESULTS, TAKEN, Argument, Input, Layout, Leafhood, Many, Plain, Ref, Slice, Special

_GENERIC = "x y z a b c d e".split()
_MAX_TENSOR_BYTES = 1 << 28  # larger tensors are not copied
_PLAIN = (type(None), bool, int, float, str)


class NotRecordable(Exception):
    """An argument that cannot be part of a recipe; the text says which."""


class Inputs:
    """The input tensors of a recipe, each under its own name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: list[Input] = []
        self._names: dict[int, str] = {}
        self._held: list[torch.Tensor] = []  # keeps the tensors alive, so that their ids stay valid

    def argument(self, value: Any, hint: str = "") -> Argument:
        """Convert one argument.

        Raises:
            NotRecordable: It contains an object that is neither a tensor nor a plain value.
        """
        if isinstance(value, torch.Tensor):
            return Ref(self.add(value, hint))
        if isinstance(value, float) and not math.isfinite(value):
            return Special("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
        if isinstance(value, torch.Size):
            value = tuple(value)
        if type(value) in _PLAIN:
            return Plain(value)
        if isinstance(value, torch.Generator):
            return Plain(None)  # a trial shows whether the call fails without it
        if value is Ellipsis:
            return Special("...")
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return Special(str(value))
        if isinstance(value, torch.device):
            return Plain("cpu")
        if isinstance(value, slice):
            start, stop, step = (self.argument(part) for part in (value.start, value.stop, value.step))
            return Slice((start, stop, step))
        if type(value) in (list, tuple):
            kind: Literal["list", "tuple"] = "list" if isinstance(value, list) else "tuple"
            return Many(tuple(self.argument(item, hint) for item in value), kind)
        raise NotRecordable(f"an argument is a {type(value).__name__}")

    def add(self, tensor: torch.Tensor, hint: str = "", grad: Leafhood | None = None) -> str:
        """Add a tensor, and return the name of its input. The same tensor is added once."""
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        copy = host_copy(tensor)
        try:
            layout, order = _layout(tensor)
            grad = grad if grad is not None else _leafhood(tensor)
        except RuntimeError as error:  # one of several views of a tensor that was written to
            raise NotRecordable("torch refuses to tell the graph of an argument") from error
        name = self._free(hint)
        self.specs.append(
            Input(
                name=name,
                dtype=str(copy.dtype).removeprefix("torch."),
                shape=tuple(copy.shape),
                device=_device(tensor),
                grad=grad,
                layout=layout,
                order=order,
            )
        )
        self.tensors[name] = copy
        self._names[id(tensor)] = name
        self._held.append(tensor)
        return name

    def _free(self, hint: str) -> str:
        wanted = _identifier(hint)
        candidates: Iterable[str] = _GENERIC
        if wanted and wanted not in TAKEN | RESULTS:
            candidates = [wanted, *(f"{wanted}_{number}" for number in range(2, 200))]
        for name in [*candidates, *(f"x{number}" for number in range(200))]:
            if name not in self.tensors:
                return name
        raise NotRecordable("it was given more than 200 tensors")


def _identifier(text: str) -> str:
    """The last name of an expression: `self.fc.weight` gives `weight`; empty for anything but names."""
    match = re.fullmatch(r"(?:\w+\.)*([A-Za-z_]\w*)(?:\[\d+\])?", text)
    return match[1].strip("_")[:24] if match else ""


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A plain, contiguous copy on the CPU; zeros for a tensor without values (meta, fake).

    Raises:
        NotRecordable: The tensor is sparse, quantised, wrapped or too large.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotRecordable("an argument is a sparse or quantised tensor")
    if tensor.numel() * tensor.element_size() > _MAX_TENSOR_BYTES:
        raise NotRecordable(f"an argument of shape {list(tensor.shape)} is too big to keep")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotRecordable("it ran under torch.func")
    if tensor.is_meta or type(tensor).__name__ == "FakeTensor":
        return torch.zeros(tuple(int(size) for size in tensor.shape), dtype=tensor.dtype, device="cpu")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise NotRecordable(f"an argument is a {type(tensor).__name__}")
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().cpu()
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        return plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _device(tensor: torch.Tensor) -> str:
    device = tensor.device
    if type(tensor).__name__ == "FakeTensor":
        return "cpu"
    return device.type if not device.index else f"{device.type}:{device.index}"


def _leafhood(tensor: torch.Tensor) -> Leafhood:
    if not tensor.requires_grad:
        return "no"
    if tensor.is_leaf:
        return "leaf"
    base = tensor._base
    return "view" if base is not None and base.is_leaf and base.requires_grad else "computed"


def _layout(tensor: torch.Tensor) -> tuple[Layout, tuple[int, ...]]:
    """The memory layout of a tensor, as far as it can matter to an operation."""
    if tensor.is_contiguous():
        return "", ()
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    expanded = tuple(dim for dim in range(tensor.dim()) if strides[dim] == 0 and sizes[dim] > 1)
    if expanded:
        return "expanded", expanded
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    if tensor.permute(order).is_contiguous():
        return "permuted", order
    return ("narrowed" if strides[-1] == 1 else "gapped"), ()
