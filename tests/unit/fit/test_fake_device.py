"""Fake tensors of a card that is not there."""

from __future__ import annotations

import copy

import torch

from torchmedic.fit.fake_device import FakeMode


def test_a_copy_shares_memory_with_its_views() -> None:
    mode = FakeMode()
    with mode:
        layer = copy.deepcopy(torch.nn.Linear(4, 4))
    assert layer.weight.fake_mode is mode  # type: ignore[attr-defined]
    with mode:
        view = layer.weight.t()
    assert view.untyped_storage()._cdata == layer.weight.untyped_storage()._cdata
