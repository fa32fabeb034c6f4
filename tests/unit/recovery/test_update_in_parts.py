"""Updates of some weights at a time: the same weights and the same state as by an update of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchmedic
from torchmedic.recovery import update_in_parts

OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.Adadelta: {},
    torch.optim.Adafactor: {},
    torch.optim.Adagrad: {},
    torch.optim.Adam: {"amsgrad": True, "weight_decay": 0.1},
    torch.optim.AdamW: {"maximize": True},
    torch.optim.Adamax: {},
    torch.optim.ASGD: {},
    torch.optim.NAdam: {},
    torch.optim.RAdam: {},
    torch.optim.RMSprop: {"momentum": 0.9, "centered": True},
    torch.optim.Rprop: {},
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def trained(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    optimizer = kind(net.parameters(), foreach=True, **options)  # type: ignore[call-arg]
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    state = [value for each in net.parameters() for value in optimizer.state[each].values() if value is not None]
    return [*net.parameters(), *(torch.as_tensor(each) for each in state)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_same_bits(kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(kind, OPTIMIZERS[kind])
    sizes = []
    original = update_in_parts._parts

    def parts(params: list[torch.Tensor]) -> list[slice]:
        found = original(params)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(update_in_parts, "_parts", parts)
    monkeypatch.setattr(update_in_parts, "_MIN_PART_BYTES", 2048)  # two weights with their biases
    monkeypatch.setattr(update_in_parts, "in_use_and_limit", lambda _: (1 << 20, 1 << 20))
    with torchmedic.recover() as happened:
        found = trained(kind, OPTIMIZERS[kind])
    assert sizes == [4, 4, 4]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert happened == []
