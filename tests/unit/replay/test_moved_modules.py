"""A model that a library has moved away is on its device for the time of a replay."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from torchmedic.replay.step.moved_modules import put_back


def _trained_on(device: torch.device) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.__dict__["_trainer"] = SimpleNamespace(strategy=SimpleNamespace(root_device=device))
    module(torch.randn(4, 2)).sum().backward()
    return module


def test_nothing_is_moved_for_a_trainer_on_the_cpu() -> None:
    module = _trained_on(torch.device("cpu"))
    before = [tensor.data_ptr() for tensor in module.parameters()]

    with put_back([module, nn.Linear(1, 1)]):
        assert [tensor.data_ptr() for tensor in module.parameters()] == before


def test_values_and_gradients_are_as_before_where_a_device_refuses_them() -> None:
    module = _trained_on(torch.device("xpu:0"))
    before = [(tensor.data_ptr(), tensor.grad) for tensor in module.parameters()]

    with put_back([module]):
        assert [(tensor.data_ptr(), tensor.grad) for tensor in module.parameters()] == before
    assert [(tensor.data_ptr(), tensor.grad) for tensor in module.parameters()] == before
