"""A trajectory goes back to an earlier update and leaves everything as it was."""

from __future__ import annotations

import torch
from torch import nn

from torchmedic.observe.numbers.windows import take_copy
from torchmedic.replay.trajectory.reduction import reduction_of
from torchmedic.replay.trajectory.repetition import difference_of
from torchmedic.replay.trajectory.state import rewound, update


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def test_everything_is_put_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    _train(model, optimizer, 2)
    copy = take_copy([optimizer], [*model.parameters(), *model.buffers()], 2)
    _train(model, optimizer, 3)
    schedule.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    state, options = optimizer.state, dict(optimizer.param_groups[0])
    moments = [value.clone() for held in state.values() for value in held.values()]

    with rewound(copy):
        first = next(model.parameters())
        start = first.detach().clone()
        update(optimizer, [(first, torch.ones_like(first))], [5.0], {"betas": (0.5, 0.5)})
        assert not torch.equal(first, start)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one is two.grad for one, two in zip(gradients, model.parameters(), strict=True))
    assert versions == [parameter._version for parameter in model.parameters()]
    assert optimizer.state is state
    assert dict(optimizer.param_groups[0]) == options
    assert all(torch.equal(a, b) for a, b in zip(moments, (v for h in state.values() for v in h.values()), strict=True))


def test_the_state_of_the_copy_is_used_and_not_used_up() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train_linear = [torch.randn(4, 3) for _ in range(3)]
    for x in _train_linear[:2]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    copy = take_copy([optimizer], list(model.parameters()), 2)
    x = _train_linear[2]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    gradients = [(parameter, parameter.grad.clone()) for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    after = [parameter.detach().clone() for parameter in model.parameters()]

    for _ in range(2):
        with rewound(copy):
            update(optimizer, gradients, [0.1], {})
            assert all(torch.equal(one, two) for one, two in zip(model.parameters(), after, strict=True))


def test_how_far_the_weights_are_from_a_copy() -> None:
    weight, other, gone = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(3))
    copy = take_copy([], [weight, other, gone], 0)
    assert copy.distance() == 0
    with torch.no_grad():
        weight += 3
        other += 3
    del gone
    assert [tensor for tensor, _ in copy.pairs()] == [weight, other]
    assert copy.distance() == 1.5


def test_how_many_elements_a_loss_adds_up() -> None:
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    assert reduction_of((a - b).square().sum()).elements == 24
    assert reduction_of((a - b).square().sum() / 6).elements == 4
    assert reduction_of((a - b).square().mean()).elements == 1
    assert reduction_of(nn.functional.mse_loss(a, b, reduction="sum")).elements == 24
    assert reduction_of(nn.functional.mse_loss(a, b)).elements == 1
    assert reduction_of(nn.functional.mse_loss(a, b) / 8) == (1.0, None, 0.125)
    assert reduction_of(nn.functional.cross_entropy(a, torch.zeros(6, dtype=torch.long), reduction="sum")).elements == 6


def test_losses_that_a_loop_adds_up() -> None:
    rows = torch.randn(20, 3)
    weight = torch.randn(3, requires_grad=True)
    losses = [(row @ weight).square() for row in rows]
    total = sum(losses, torch.zeros(()))
    assert reduction_of(total) == (20, total.grad_fn, 1.0)
    assert reduction_of(sum(losses, torch.zeros(())) / 20).elements == 1
    assert reduction_of(sum((loss / 20 for loss in losses), torch.zeros(()))).elements == 1
    assert reduction_of(losses[0] + losses[1]).node is None
    pairs = torch.randn(20, 5, 3)
    sums = [(pair @ weight).square().sum() for pair in pairs]
    assert reduction_of(sum(sums, torch.zeros(()))).elements == 100


def test_an_optimizer_that_asks_for_the_loss() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    def evaluate() -> tuple[float, list[tuple[torch.Tensor, torch.Tensor]]]:
        loss = closure()
        return float(loss), [(tensor, tensor.grad) for tensor in model.parameters() if tensor.grad is not None]

    optimizer.step(closure)
    copy = take_copy([optimizer], list(model.parameters()), 1)
    optimizer.step(closure)
    after = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with rewound(copy):
            update(optimizer, [], [0.5], {}, evaluate)
            assert all(torch.equal(one, two) for one, two in zip(model.parameters(), after, strict=True))


def test_the_momentum_of_then() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    copy = take_copy([optimizer], [weight], 0)
    with rewound(copy):
        for _ in range(2):
            update(optimizer, [(weight, torch.ones(2))], [1.0], {}, momenta=({"momentum": 0.5},))
        assert weight.tolist() == [-1.5, -1.5]
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_recorded_loss_that_a_scaler_has_multiplied() -> None:
    assert difference_of(0.983279, 64440.2, is_scaled=True) < 1e-5
    assert difference_of(0.983279, 64440.2, is_scaled=False) > 0.9
    assert difference_of(0.9, 64440.2, is_scaled=True) > 0.05
    assert difference_of(float("nan"), float("inf"), is_scaled=True) == 0
    assert difference_of(1.0, float("nan"), is_scaled=True) == float("inf")
    assert difference_of(0.0, 5.0, is_scaled=True) == 1


def test_a_weight_that_is_not_to_be_updated_keeps_its_value_and_its_gradient() -> None:
    updated, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    present = other.grad = torch.full((2,), 5.0)
    optimizer = torch.optim.SGD([updated, other], lr=0.5)

    update(optimizer, [(updated, torch.ones(2))], [0.5], {})

    assert updated.tolist() == [0.5, 0.5]
    assert other.tolist() == [1.0, 1.0]
    assert other.grad is present
