"""What the host reads of fake tensors: numbers, lists, arrays and addresses, invented where no value is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchmedic.replay.shadow.fake_cuda import replaced


def _numpy(tensor: torch.Tensor) -> Any:
    import numpy

    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return numpy.zeros(tuple(tensor.shape), dtype=str(dtype).removeprefix("torch."))


def _tolist(tensor: torch.Tensor) -> Any:
    def nested(shape: tuple[int, ...]) -> Any:
        return value if not shape else [nested(shape[1:]) for _ in range(shape[0])]

    value = True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
    return nested(tuple(tensor.shape))


def _format(tensor: torch.Tensor, spec: str = "") -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else repr(tensor)


def _for_fakes(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, *args, **kwargs)
        return _format(self, *args) if name == "__format__" else answer(self)

    return method


@contextlib.contextmanager
def host_values() -> Iterator[None]:
    """Let code of the host read fake tensors, and let nothing be written to files, until the end of the block."""
    answers = {
        "numpy": _numpy,
        "__array__": _numpy,
        "tolist": _tolist,
        "__format__": _format,
        "data_ptr": lambda tensor: id(tensor.untyped_storage()),
        "share_memory_": lambda tensor: tensor,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(replaced(torch.Tensor, name, _for_fakes(name, answer)))
        stack.enter_context(replaced(torch, "save", lambda *args, **kwargs: None))
        yield
