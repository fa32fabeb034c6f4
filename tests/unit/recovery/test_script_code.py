"""Code of the script in a backward pass that is repeated."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.recovery.computed_again import Refused
from torchmedic.recovery.script_code import reason_against, without_trace


class Noting(torch.autograd.Function):
    seen: list[float] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Noting.seen.append(1.0)
        return gradient


def test_a_trace_would_be_there_twice() -> None:
    seen: list[int] = []
    weight = nn.Parameter(torch.ones(4))
    noting: Any = Noting.apply
    noted = noting(weight).sum()
    with pytest.raises(Refused, match="leaves a trace"), without_trace(sys._getframe(), [noted], has_hooks=False):
        noted.backward()
    assert Noting.seen == []
    hooked = (weight * 2).sum()
    with pytest.raises(Refused), without_trace(sys._getframe(), [hooked], has_hooks=True):
        seen.append(1)
    scaled = (weight * 2).sum()
    scaled.register_hook(lambda gradient: gradient * 2)
    with without_trace(sys._getframe(), [scaled], has_hooks=True):
        scaled.backward()


def test_memory_that_ends_in_a_hook() -> None:
    weight = nn.Parameter(torch.ones(4))

    def fails(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = weight.register_post_accumulate_grad_hook(fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        weight.sum().backward()
    assert "in a hook of a parameter" in reason_against(caught.value, [weight])
    handle.remove()
    assert not reason_against(caught.value, [weight])
