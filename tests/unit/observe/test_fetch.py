"""Numbers of a device reach the host in order, and a look that may not wait does not."""

from __future__ import annotations

import pytest
import torch

from torchmedic.observe.device import async_devices
from torchmedic.observe.device.async_devices import Fetch


class SlowDevice:
    """Copies only when it is told to."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def places(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
        return torch.full((count,), 7, dtype=dtype), None

    def arrange_many(self, host: torch.Tensor, event: object, values: torch.Tensor) -> None:
        self.copies.append((host, values))

    def finish(self) -> None:
        for host, values in self.copies:
            host.copy_(values)


TENSORS = [torch.tensor(3, dtype=torch.int32), torch.tensor([float("nan")]), torch.tensor(True), torch.tensor(-0.5)]


def test_it_waits_where_it_may() -> None:
    fetch = Fetch(TENSORS, may_wait=True)
    assert fetch.has_arrived
    assert str(fetch.values()) == "[3.0, nan, 1.0, -0.5]"


def test_it_does_not_wait_where_it_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice()
    monkeypatch.setitem(async_devices.devices, "cpu", device)  # type: ignore[arg-type]
    fetch = Fetch(TENSORS, may_wait=False)
    assert not fetch.has_arrived
    device.finish()
    assert fetch.has_arrived
    assert str(fetch.values()) == "[3.0, nan, 1.0, -0.5]"


def test_nothing_to_fetch() -> None:
    fetch = Fetch([], may_wait=False)
    assert fetch.has_arrived
    assert fetch.values() == []
