"""What a wait for the device costs, measured on a simulated device whose true cost is known."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from torchmedic.observe.device.device_waits import DeviceWaits, Waited
from torchmedic.observe.device.wait_calls import WaitCalls

SYNC, COPY = 1, 2  # sites
Step = Callable[["Device"], None]


class Device:
    """A host and a queue with one clock. Work is given a start when it is launched, as on a real device."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = 0.0  # when the queue is empty
        self.waits: DeviceWaits | None = None
        self.without = 0  # a site that is left out

    # What DeviceWaits asks

    def is_usable(self) -> bool:
        return True

    def is_busy(self) -> bool:
        return self.free > self.now

    def mark(self) -> float:
        return max(self.now, self.free)

    def is_reached(self, mark: float) -> bool:
        return mark <= self.now

    def between(self, first: float, second: float) -> float:
        return second - first

    def delay(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds

    # What a loop does

    def host(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, count: int, prepared: float, works: float) -> None:
        for _ in range(count):
            self.now += prepared
            self.free = max(self.now, self.free) + works

    def wait(self, site: int = SYNC, works: float = 0.0, *, blocks: bool = True) -> None:
        if site == self.without:
            return
        watched = self.waits is not None and self.waits.armed
        noted = watched and self.waits.begins(site, sys._getframe(), "item", uploads=site == COPY)
        self.free = max(self.now, self.free) + works
        if blocks:
            self.now = max(self.now, self.free) + 1e-5
        if noted:
            self.waits.ended()


def measured(step: Step) -> list[Waited]:
    device, found, steps = Device(), [], [0]
    waits = device.waits = DeviceWaits(device, lambda: steps[0], lambda: True, found.extend, lambda: device.now)
    for _ in range(100):
        step(device)
        steps[0] += 1
        waits.step_ended()
    assert waits.over
    assert not waits.armed
    return found


def true_share(step: Step, site: int) -> float:
    """Of a step, by leaving the wait out."""
    times = []
    for without in (0, site):
        device = Device()
        device.without = without
        for _ in range(20):
            step(device)
        before = max(device.now, device.free)
        for _ in range(50):
            step(device)
        times.append(max(device.now, device.free) - before)
    return 1 - times[1] / times[0]


def gpu_bound(device: Device) -> None:
    device.launch(20, 2e-5, 4e-4)
    device.wait()
    device.launch(20, 3e-5, 1e-5)


def host_bound(device: Device) -> None:
    device.launch(200, 5e-5, 1e-5)
    device.wait()


def much_to_do_after(device: Device) -> None:
    device.launch(20, 2e-5, 4e-4)
    device.wait()
    device.host(3e-3)


def cheap_reading(device: Device) -> None:
    device.launch(50, 2e-5, 1e-3)
    device.wait()


def copy_would_wait_instead(device: Device) -> None:
    device.launch(20, 2e-5, 4e-4)
    device.wait(SYNC)
    device.wait(COPY, 1e-4)
    device.host(3e-3)


def copy_that_does_not_wait(device: Device) -> None:
    device.launch(20, 2e-5, 4e-4)
    device.wait(SYNC)
    device.wait(COPY, 1e-4, blocks=False)
    device.host(3e-3)


@pytest.mark.parametrize("step", [gpu_bound, host_bound, much_to_do_after, cheap_reading, copy_that_does_not_wait])
def test_the_share_is_what_leaving_it_out_would_save(step: Step) -> None:
    (found,) = [one for one in measured(step) if one.name == "item" and not one.uploads]
    truth = true_share(step, SYNC)
    assert found.share == pytest.approx(truth, abs=0.02)
    assert found.share <= truth + 1e-3  # never more than the truth


def test_a_wait_that_another_would_take_over_costs_nothing() -> None:
    shares = [one.share for one in measured(copy_would_wait_instead) if not one.uploads]
    assert all(share < 0.01 for share in shares)
    assert true_share(copy_would_wait_instead, SYNC) < 0.01


def test_a_loop_without_waits_is_left_alone_after_two_steps() -> None:
    device, steps = Device(), [100]
    waits = device.waits = DeviceWaits(device, lambda: steps[0], lambda: True, pytest.fail, lambda: device.now)
    for _ in range(4):
        device.launch(20, 2e-5, 4e-4)
        steps[0] += 1
        waits.step_ended()
    assert waits.over


class Busy(Device):
    """Busy before every call and idle after it, as if each had waited."""

    def is_busy(self) -> bool:
        self.free += 1
        return self.free % 2 == 1

    def is_reached(self, mark: float) -> bool:
        return True

    def delay(self, seconds: float) -> None:
        pass


def test_the_calls_of_torch_are_seen_at_their_line_and_put_back() -> None:
    before = {name: torch.Tensor.__dict__.get(name) for name in ("item", "__float__", "__bool__", "cpu", "to")}
    found: list[Waited] = []
    steps = [100]
    device = Busy()
    waits = DeviceWaits(device, lambda: steps[0], lambda: True, found.extend)
    value = torch.tensor(2.0)
    line = sys._getframe().f_lineno + 4  # of `float`
    for _ in range(40):
        steps[0] += 1
        waits.step_ended()
        assert float(value) == 2.0
    assert waits.over
    assert {name: torch.Tensor.__dict__.get(name) for name in before} == before
    assert {(one.place.line, one.name) for one in found} == {(line, "__float__")}


def test_tensors_are_no_sequences_to_torch_while_calls_are_watched_and_after() -> None:
    class Nobody:
        def begins(self, *args: object, **kwargs: object) -> bool:
            return False

        def ended(self) -> None: ...

    calls = WaitCalls(Nobody())
    calls.arm()
    try:
        armed = torch.tensor([torch.rand(1), torch.rand(1)]).shape
    finally:
        calls.disarm()
    assert armed == torch.tensor([torch.rand(1), torch.rand(1)]).shape == (2,)
    with pytest.raises(ValueError, match="only one element"):
        torch.tensor([torch.rand(3), torch.rand(3)])
