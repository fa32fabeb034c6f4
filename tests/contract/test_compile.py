"""torch.compile compiles the same graphs, with the same breaks and the same warnings, as without torchmedic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import run_plain, run_script

pytestmark = pytest.mark.timeout(300)  # torch.compile takes its time

SCRIPT = """
import torch
from torch import nn
from torch.func import functional_call, grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


def batch():
    return torch.randn(2, 4)


def show(name):
    seen = torch._dynamo.utils.counters
    breaks = sum(seen["graph_break"].values())
    print(name, seen["stats"]["unique_graphs"], seen["stats"]["calls_captured"], breaks, flush=True)
    torch._dynamo.reset()
    seen.clear()


def loop(forward, optimizer, name, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        forward(batch()).square().mean().backward()
        optimizer.step()
    show(name)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
loop(torch.compile(model, backend="eager", fullgraph=True), optimizer, "a module")
loop(torch.compile(lambda x: model(x) + model.body(x), backend="eager", fullgraph=True), optimizer, "a function")
loop(torch.compile(model, backend="aot_eager", fullgraph=True), optimizer, "a module and its backward")


@torch.compile(backend="eager")
def update():
    optimizer.step()


for step in range(4):
    optimizer.zero_grad()
    model(batch()).sum().backward()
    update()
show("an optimizer")


@torch.compile(backend="eager")
def whole_step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


for step in range(4):
    whole_step(batch())
show("a whole step")


@torch.compile(backend="eager")
def step_that_clears_first(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


for step in range(4):
    step_that_clears_first(batch())
show("a whole step that clears gradients first")


@torch.compile(backend="eager")
def gradients(x):
    return torch.autograd.grad(model(x).sum(), list(model.parameters()))


@torch.compile(backend="eager", fullgraph=True)
def functional_gradients(weights, x):
    return grad(lambda those: functional_call(model, those, (x,)).sum())(weights)


weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
for step in range(3):
    gradients(batch())
    functional_gradients(weights, batch())
    model(batch()).sum().backward()
show("autograd.grad and func.grad")

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.compile(backend="eager", fullgraph=True)
loop(model, optimizer, "module.compile")
print([float(tensor.detach().sum()).hex() for tensor in model.parameters()])
"""


def test_the_same_graphs(tmp_path: Path) -> None:
    plain, other = run_plain(tmp_path, SCRIPT), run_script(tmp_path, SCRIPT)

    assert plain.returncode == 0, plain.stderr
    assert other.stdout == plain.stdout, other.stderr
    assert without_stamps(other.stderr) == without_stamps(plain.stderr)


def without_stamps(text: str) -> str:
    """Without the time and the process of a log line."""
    return re.sub(r"^([A-Z])\d{4} \S+ \d+ ", r"\1 ", text, flags=re.M)
