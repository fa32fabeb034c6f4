"""The copy of the weights: when it is taken, renewed and given back, and that it is exchanged without a trace."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.evidence.weight_stand_ins import Rewound, StandIns
from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.weight_copies import Rewind


class Device:
    """The CPU as a device that is read late."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.out_of_memory: Any = None

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def timer(self) -> None:
        return None

    def when_out_of_memory(self, react: Any) -> None:
        self.out_of_memory = react


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(1 << 30)
    monkeypatch.setitem(async_devices.devices, "cpu", device)  # type: ignore[arg-type]
    return device


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_weights_and_buffers_of_the_step_are_there_to_go_back_to(device: Device) -> None:
    model, optimizer = trained()
    rewind = Rewind()
    rewind.see(model)
    rewind.offer(optimizer, 5, 1e9)  # a step so long that every one is copied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for tensor in [*model.parameters(), model[1].running_mean]:  # type: ignore[index]
            tensor.fill_(float("nan"))
    pointers = [tensor.data_ptr() for tensor in model.parameters()]

    rewound = Rewound(rewind.originals())
    assert {original.step for original in rewind.originals()} == {5}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    rewound.put_back()
    assert [tensor.data_ptr() for tensor in model.parameters()] == pointers
    assert all(tensor.isnan().all() for tensor in model.parameters())


def test_it_is_renewed_as_often_as_the_length_of_a_step_allows(device: Device) -> None:
    _, optimizer = trained()
    rewind = Rewind()
    steps = []
    for step in range(6):
        rewind.offer(optimizer, step, 1e9)
        steps.append({original.step for original in rewind.originals()})
    assert steps == [{0}, {1}, {2}, {3}, {4}, {5}]

    short = Rewind()
    for step in range(50):
        short.offer(optimizer, step, 1e-6)
    assert {original.step for original in short.originals()} == {0}


def test_no_copy_where_memory_is_scarce(device: Device) -> None:
    _, optimizer = trained()
    device.free = 1000
    rewind = Rewind()
    rewind.offer(optimizer, 0, 1.0)
    assert rewind.originals() == []


def test_it_is_given_back_when_memory_gets_scarce(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained()
    rewind = Rewind()
    rewind.offer(optimizer, 0, 1e9)
    assert rewind.originals()
    device.free = 10
    monkeypatch.setattr(rewind, "_next_look", 0.0)
    rewind.offer(optimizer, 1, 1e9)
    assert rewind.originals() == []


def test_it_is_given_back_for_good_when_an_allocation_fails(device: Device) -> None:
    _, optimizer = trained()
    rewind = Rewind()
    rewind.offer(optimizer, 0, 1e9)
    device.out_of_memory(0, 1, 2, 3)
    assert rewind.originals() == []
    for step in range(1, 600):
        rewind.offer(optimizer, step, 1e9)
    assert rewind.originals() == []


def test_it_keeps_no_model_alive(device: Device) -> None:
    model, optimizer = trained()
    rewind = Rewind()
    rewind.see(model)
    rewind.offer(optimizer, 0, 1e9)
    del model, optimizer
    gc.collect()
    assert rewind.originals() == []


def test_other_memory_formats_are_copied_as_they_are(device: Device) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rewind = Rewind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewind.offer(optimizer, 0, 1e9)
    found = {id(original.tensor): original.value for original in rewind.originals()}
    assert found[id(model.weight)].stride() == model.weight.stride()
    assert torch.equal(found[id(model.weight)], model.weight)


def test_a_cpu_is_not_copied() -> None:
    _, optimizer = trained()
    rewind = Rewind()
    rewind.offer(optimizer, 0, 1e9)
    assert rewind.originals() == []


def test_stand_ins_keep_what_is_finite() -> None:
    weight = torch.randn(4, 3)
    weight[2] = float("nan")
    before = weight.clone()
    stand_ins = StandIns([weight])
    assert torch.isfinite(weight).all()
    assert torch.equal(weight[[0, 1, 3]], before[[0, 1, 3]])
    stand_ins.put_back()
    assert weight[2].isnan().all()


def test_a_graph_that_has_saved_the_weights_stays_valid() -> None:
    weight = torch.full((3, 3), float("nan"), requires_grad=True)
    x = torch.ones(2, 3, requires_grad=True)
    result = x @ weight
    stand_ins = StandIns([weight])
    stand_ins.put_back()
    result.sum().backward()  # raises if the weights look changed
    assert x.grad is not None
