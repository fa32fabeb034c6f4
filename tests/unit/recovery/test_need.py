"""The guard is up as long as a step may run out of memory, and no longer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchmedic
from torchmedic.recovery import install, need, session

GIB = 1 << 30


@pytest.mark.parametrize(
    ("used", "is_up"),
    [
        pytest.param(int(0.3 * GIB), False, marks=pytest.mark.slow),
        (int(0.9 * GIB), False),  # half of it is in use, but steps are small beside the rest
        (GIB - (1 << 20), True),
    ],
)
def test_steps_that_may_not_fit(used: int, is_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(need, "_used_and_allowed", lambda: [(used, GIB)])
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    with torchmedic.recover():
        assert install._installed is not None
        for _ in range(14):
            optimizer.zero_grad()
            net(torch.ones(1024, 64)).mean().backward()
            optimizer.step()
            seen.append(install._installed.session.is_up)
    assert all(seen[:9])
    assert seen[-1] is is_up


def test_with_the_guard_down_torch_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    used = GIB // 4
    monkeypatch.setattr(need, "_used_and_allowed", lambda: [(used, GIB)])
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.0)
    engine, zero_grad = torch.autograd.Variable._execution_engine, torch.optim.Optimizer.zero_grad
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guarded = []
    with torchmedic.recover():
        for step in range(26):
            used = GIB - 1 if step == 18 else used
            optimizer.zero_grad()
            net(torch.ones(1024, 64)).mean().backward()
            optimizer.step()
            is_ours = "recovery" in torch.optim.Optimizer.zero_grad.__code__.co_filename
            guarded.append((torch.autograd.Variable._execution_engine is not engine, is_ours))
    assert guarded[:9] == [(True, True)] * 9
    assert guarded[12:18] == [(False, False)] * 6
    assert guarded[19:] == [(True, True)] * 7  # memory is short
    assert torch.autograd.Variable._execution_engine is engine
    assert torch.optim.Optimizer.zero_grad is zero_grad
