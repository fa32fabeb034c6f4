"""Verdicts on memory by how it was filled: what grows, what saves, what a helper has made."""

from __future__ import annotations

from pathlib import Path

import pytest
from address_space import HEAD_WITH_ROOM, marked, ran_out
from running import run_script

HOST = ("TM401", "TM414")  # there is no memory on the host; or a limit of the process refused it

FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "a hidden state in two parts, kept as an attribute": (
        ("TM403",),
        """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.head = nn.LSTMCell(16, 512), nn.Linear(512, 4)
        self.state = (torch.zeros(256, 512), torch.zeros(256, 512))
    def act(self, seen):
        self.state = self.core(seen, self.state)  # <- cause
        return self.head(self.state[0])
agent = Agent()
room(120)
while True:
    chosen = torch.distributions.Categorical(logits=agent.act(torch.randn(256, 16))).sample()
""",
    ),
    "exceptions in a list": (
        ("TM403",),
        """
net, failed = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64)), []
def checked(x):
    out = net(x)
    if out.max() > 0:
        raise ValueError("too large")
    return out
room(100)
while True:
    try:
        checked(torch.randn(256, 64)).mean().backward()
    except ValueError as error:
        failed.append(error)  # <- cause
""",
    ),
    "functions in a list, each with a tensor": (
        ("TM403",),
        """
net, later = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 1)), []
room(100)
for _ in range(1000):
    out = net(torch.randn(256, 64))
    later.append(lambda out=out: out.mean().item())  # <- cause
print(sum(each() for each in later))
""",
    ),
    "a queue that grows in forward": (
        ("TM412",),
        """
class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 1024)
        self.register_buffer("queue", torch.zeros(0, 1024))
    def forward(self, x):
        found = self.encoder(x)
        near = (found[:8] @ self.queue.t()).mean()
        self.queue = torch.cat([self.queue, found.detach()])  # <- cause
        return near + found.mean()
model = Contrast()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
room(150)
while True:
    optimizer.zero_grad()
    model(torch.randn(2000, 8)).backward()
    optimizer.step()
""",
    ),
    "a cache without an end": (
        ("TM412",),
        """
import functools
class Features:
    scale = torch.linspace(0, 1, 1024)
    @functools.lru_cache(maxsize=None)  # <- cause
    def of(self, number):
        return torch.rand(1024, 1) * self.scale  # all pairs are meant, and small beside what is kept
features, head = Features(), nn.Linear(1024, 1)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
room(100)
for number in range(10000):
    optimizer.zero_grad()
    head(features.of(number)).mean().backward()
    optimizer.step()
""",
    ),
    "what a loop has collected, joined after it": (
        ("TM412",),
        """
net = nn.Linear(16, 1000)
def predict(times):
    found = []
    with torch.no_grad():
        for _ in range(times):
            found.append(net(torch.randn(500, 16)).softmax(-1))  # <- cause
    return torch.cat(found)
room(150)
predict(50)
""",
    ),
    "batches that grow, with other calls of the model in between": (
        ("TM411",),
        """
pool, labels = torch.randn(40000, 64), torch.randint(0, 2, (40000,))
net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
known = 500
room(120)
while True:
    for _ in range(2):
        loss = F.cross_entropy(net(pool[:known]), labels[:known])  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        net(pool[-800:])
    known = int(1.5 * known)
""",
    ),
    "the gradient of a table that is indexed": (
        ("TM409",),
        """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.kinds = nn.Parameter(torch.zeros(500_000, 40)), nn.Parameter(torch.zeros(9, 40))
    def forward(self, one, kind, two):
        return (self.nodes[one] + self.kinds[kind] - self.nodes[two]).norm(dim=-1).mean()  # <- cause
graph = Graph()
room(60)
graph(torch.arange(64), torch.zeros(64, dtype=torch.long), torch.arange(64)).backward()
""",
    ),
    "what a function of one's own saves": (
        HOST,
        """
class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        out = x * gate
        ctx.parts = (x, gate, out)  # <- cause
        return out
    @staticmethod
    def backward(ctx, gradient):
        x, gate, out = ctx.parts
        return gradient * (gate + out * (1 - gate))
layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(40))
room(100)
x = torch.randn(8000, 128)
for layer in layers:
    x = Gated.apply(layer(x))
x.mean().backward()
""",
    ),
    "what a checkpoint computes again": (
        HOST,
        """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)
    def forward(self, x):
        near = torch.softmax(self.query(x) @ x.transpose(0, 1), -1)  # <- cause
        return x + near @ x
first, second = Block(), Block()
x = torch.randn(4000, 16)
room(160)
loss = checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False).mean()
loss.backward()
""",
    ),
    "an evaluation in a comprehension": (
        ("TM405",),
        """
def model():
    return nn.Sequential(nn.Linear(32, 512), *(nn.Tanh() for _ in range(5)), nn.Linear(512, 4))
models = [model().eval() for _ in range(4)]
optimizer = torch.optim.SGD([weight for each in models for weight in each.parameters()], lr=0.1)
sum(each(torch.randn(8, 32)).mean() for each in models).backward()
optimizer.step()
def vote(x):
    return torch.stack([each(x).softmax(-1) for each in models]).mean(0).argmax(-1)  # <- cause
room(150)
print(vote(torch.randn(16000, 32)).sum().item())
""",
    ),
    "an evaluation in the function that also trains": (
        ("TM403",),
        """
net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def passed(train, times):
    total = {"loss": 0.0}
    for _ in range(times):
        loss = net(torch.randn(256, 64)).pow(2).mean()
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total["loss"] += loss  # <- cause
    return total
passed(True, 2)
room(60)
passed(False, 1000)
""",
    ),
    "losses that wait for a backward which comes too late": (
        ("TM403",),
        """
net, waiting = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1)), []
room(60)
for step in range(1000):
    waiting.append(net(torch.randn(256, 64)).pow(2).mean())  # <- cause
    if step % 500 == 499:
        sum(waiting).backward()
        waiting.clear()
""",
    ),
    "steps of an inner loop that backward goes through": (
        HOST,
        """
start = [torch.randn(512, 512, requires_grad=True) * 0.01 for _ in range(2)]
def adapted(weights, x, steps):
    for _ in range(steps):
        loss = (torch.tanh(x @ weights[0]) @ weights[1]).pow(2).mean()
        found = torch.autograd.grad(loss, weights, create_graph=True)  # <- cause
        weights = [weight - 0.1 * slope for weight, slope in zip(weights, found)]  # <- cause
    return weights
x = torch.randn(32, 512)
room(100)
one, two = adapted(start, x, 500)
(torch.tanh(x @ one) @ two).pow(2).mean().backward()
""",
    ),
    "the state of an optimizer of one's own": (
        ("TM408",),
        """
class Slow(torch.optim.Optimizer):
    def __init__(self, weights):
        super().__init__(weights, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["slow"] = torch.zeros_like(weight)
            self.state[weight]["last"] = weight.clone()
            weight.sub_(weight.grad, alpha=0.1)
net = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(6)))
optimizer = Slow(net.parameters())
net(torch.randn(2, 1500)).mean().backward()
room(60)
optimizer.step()  # <- cause
""",
    ),
}

HELPER = """
from torch import nn
def table(rows, width):
    made = nn.Embedding(rows, width)  # <- cause
    nn.init.zeros_(made.weight)
    return made
"""

USES_HELPER = """
from tables import table
class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.users = table(500_000, 40), nn.Embedding(1000, 40)
    def forward(self, user, item):
        return (self.users(user) * self.items(item)).mean()
model = Items()
room(60)
model(torch.arange(64), torch.arange(64)).backward()
"""


@pytest.mark.parametrize("name", FAILURES)
def test_the_verdict_and_the_line(tmp_path: Path, name: str) -> None:
    codes, body = FAILURES[name]
    ran_out(tmp_path, body, codes)


def test_a_table_that_a_helper_has_made_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "tables.py").write_text(HELPER)
    found = run_script(tmp_path, HEAD_WITH_ROOM + USES_HELPER).report.diagnoses[-1]

    assert found.code == "TM409"
    assert found.cause_location is not None
    assert (found.cause_location.file, [found.cause_location.line]) == ("tables.py", marked(HELPER))
