"""`torchmedic.checkup` for unit tests: it finds what a run finds, and leaves everything as it was."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmedic

PAGE = Path(__file__).parents[2] / "docs" / "checkup.md"


class Net(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)
        self.last = last or nn.Identity()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.last(self.head(self.body(x)))
        return out


class CutNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x).detach())
        return out


class DeadNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        nn.init.constant_(self.body[0].bias, -100)  # type: ignore[union-attr,arg-type]


def codes(model: nn.Module, batch: object, loss_fn: object) -> list[str]:
    return [found.code for found in torchmedic.checkup(model, batch, loss_fn)]  # type: ignore[arg-type]


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 4), torch.rand(shape or (16, 1))


def test_a_healthy_step_is_told_nothing() -> None:
    assert codes(Net(), batch(), nn.MSELoss()) == []
    assert codes(Net(nn.Sigmoid()), batch(), nn.BCELoss()) == []
    assert codes(Net(), batch()[0], lambda out: out.square().mean()) == []
    assert codes(Net(), ({"x": batch()[0]}, batch()[1]), nn.MSELoss()) == []


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_a_run_finds_is_found() -> None:
    assert codes(Net(), batch(16), nn.MSELoss()) == ["TM632"]
    assert codes(Net(nn.Sigmoid()), batch(), nn.BCEWithLogitsLoss()) == ["TM633"]
    assert codes(Net(nn.Sigmoid()), (torch.randn(16, 4), torch.full((16, 1), 7.0)), nn.MSELoss()) == ["TM634"]
    assert codes(CutNet(), batch(), nn.MSELoss()) == ["TM631"]
    assert codes(DeadNet(), batch(), nn.MSELoss()) == ["TM636"]
    assert codes(Net(), batch(), lambda out, y: (out.round() - y - 1).square().mean()) == ["TM635"]
    assert codes(Net(), batch(), lambda out, y: torch.tensor(out.mean().item(), requires_grad=True)) == ["TM630"]


def test_the_line_is_that_of_the_model() -> None:
    (found,) = torchmedic.checkup(CutNet(), batch(), nn.MSELoss())
    assert found.cause_location is not None
    assert found.cause_location.code == "out: torch.Tensor = self.head(self.body(x).detach())"


def test_everything_is_as_it_was() -> None:
    model = Net().train()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters()}
    values = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
    state, steps = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    versions = [tensor._version for tensor in model.parameters()]
    torch_before = (torch.Tensor.__dict__.get("detach"), torch.Tensor.data, torch.fx.traceback.format_stack)
    random_state, plain_state, calls = torch.get_rng_state(), random.getstate(), model.calls

    torchmedic.checkup(
        model, (x, y), lambda out, y: nn.functional.mse_loss(out.detach() + 0 * model.head.weight.sum(), y)
    )
    torchmedic.checkup(model, (x, y), nn.MSELoss())

    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == plain_state
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(steps)
    for name, tensor in model.named_parameters():
        assert tensor.grad is gradients[name]
        value = values[name]
        assert (tensor.grad is None) == (value is None)
        assert tensor.grad is None or value is None or torch.equal(tensor.grad, value)
    assert [tensor._version for tensor in model.parameters()] == versions
    assert model.training
    assert model.calls == calls
    assert not torch.is_anomaly_enabled()
    assert (torch.Tensor.__dict__.get("detach"), torch.Tensor.data, torch.fx.traceback.format_stack) == torch_before


def test_a_step_that_raises_leaves_no_trace() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())

    def broken(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    with pytest.raises(ValueError, match="no loss today"):
        torchmedic.checkup(model, batch(), broken)
    with pytest.raises(TypeError, match="returned float"):
        torchmedic.checkup(model, batch(), lambda out, y: 1.0)  # type: ignore[arg-type,return-value]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.is_anomaly_enabled()


def test_the_example_of_the_page_passes(tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python test\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "test_model.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--disable-plugin-autoload",
        "-p",
        "no:cacheprovider",
        "test_model.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_to_import_torchmedic_is_not_to_import_torch() -> None:
    code = "import sys, torchmedic; assert 'torch' not in sys.modules; assert 'checkup' in torchmedic.__all__"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
