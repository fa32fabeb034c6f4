"""Optimizer state that forward passes have no room beside: it leaves memory after each update, unseen by training."""

from __future__ import annotations

import torch

import torchmedic
from torchmedic.recovery import install


def trained(*, is_short: bool) -> tuple[list[torch.Tensor], list[int]]:
    """The weights and the state, and the number of storages that were out of memory in each forward pass."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    out = []
    with torchmedic.recover():
        assert install._installed is not None
        session = install._installed.session
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(6):
            out.append(len(session.optimizers.out))
            optimizer.zero_grad()
            if is_short and step in (1, 3):
                session.recovered("forward", "optimizer", "linear", 32 << 10, 0.0)
            net(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    state = [value for each in net.parameters() for value in optimizer.state[each].values()]
    return [*net.parameters(), *state], out


def test_parked_after_each_update() -> None:
    wanted, never = trained(is_short=False)
    found, out = trained(is_short=True)
    assert never == [0, 0, 0, 0, 0, 0]
    assert out == [0, 0, 0, 0, 2, 2]  # from the second time on; 16 KiB each
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
