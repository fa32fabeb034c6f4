"""Fake tensors of a card that is not there."""

from __future__ import annotations

import copy

from torchmedic.fit.fake_device import FakeMode


def test_a_copied_tensor_stays_in_its_mode() -> None:
    # `copy.deepcopy` copies what a fake tensor refers to. In another mode, views of the copy have memory of their own.
    mode = FakeMode()
    assert copy.deepcopy({"fake_mode": mode})["fake_mode"] is mode
