"""Verdicts on memory in code of other shapes: which cause, at which line, and which cause it must not be taken for."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Finished, marked_line, run_script

HEAD = """
import resource
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, -1))
def deep():
    return nn.Sequential(nn.Linear(16, 256), *(nn.Tanh() for _ in range(20)), nn.Linear(256, 1))
"""
HOST = ("TM401", "TM414")  # there is no memory on the host; or a limit of the process refused it

FAILURES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a validation between two epochs, in training mode": (
        ("TM405",),
        """
class Evaluator:
    def __init__(self, model):
        self.model = model
    def predict(self, x):
        return self.model(x).sign()  # <- cause
    def accuracy(self, x, y):
        return (self.predict(x).squeeze(-1) == y).float().mean().item()
model = deep()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(2):
        loss = model(torch.randn(8, 16)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(Evaluator(model).accuracy(torch.randn(12000, 16), torch.ones(12000)))
""",
        "",
    ),
    "a meter that adds up losses": (
        ("TM403",),
        """
class Meter:
    def __init__(self):
        self.sum = self.count = 0
    def update(self, value, n):
        self.sum += value * n  # <- cause
        self.count += n
model = deep()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def validate():
    meter = Meter()
    for _ in range(100):
        meter.update(model(torch.randn(600, 16)).mean(), 600)
    return meter
model(torch.randn(8, 16)).mean().backward()
optimizer.step()
validate()
""",
        "",
    ),
    "a model that is trained in evaluation mode, by another method": (
        HOST,
        """
class Trainer:
    def __init__(self):
        self.model = deep().eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
    def compute(self, x):
        self.loss = self.model(x).mean()  # <- cause
    def optimize(self):
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()
trainer = Trainer()
for n in (6, 8, 12000):
    trainer.compute(torch.randn(n, 16))
    trainer.optimize()
""",
        "",
    ),
    "all pairs, on purpose": (
        HOST,
        """
def kernel(a, b):
    return torch.exp(-(a[:, None] - b).pow(2).sum(-1))  # <- cause
net = nn.Linear(4, 8)
net(torch.randn(4, 4)).sum().backward()
kernel(net(torch.randn(4000, 4)), torch.randn(4000, 8)).mean().backward()
""",
        "",
    ),
    "a handler that fails": (
        HOST,
        """
model, log = deep(), {}
for step in range(2):
    try:
        out = model(torch.randn(20000, 16))  # <- cause
        out.mean().backward()
    except RuntimeError as error:
        log["errors"].append(str(error))
""",
        "the run ended with KeyError, raised while this was handled",
    ),
    "a second attempt while the first one is handled": (
        HOST,
        """
model = deep()
def attempt(x):
    out = model(x)  # <- cause
    out.mean().backward()
x = torch.randn(20000, 16)
try:
    attempt(x)
except RuntimeError:
    attempt(x[:5000])
""",
        "is still being handled: its frames hold",
    ),
    "the whole data set": (
        ("TM406",),
        """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(30000, 16), torch.randn(30000, 1))
model = deep()
x, y = next(iter(DataLoader(data, batch_size=len(data), shuffle=True)))
for epoch in range(3):
    out = model(x)  # <- cause
    F.mse_loss(out, y).backward()
""",
        "",
    ),
    "copies of the model that are put aside": (
        ("TM412",),
        """
import copy
class Ensemble:
    def __init__(self):
        self.members = []
    def __call__(self, model):
        clone = copy.deepcopy(model)
        self.members.append(clone)  # <- cause
model = nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 1000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
keep = Ensemble()
for epoch in range(50):
    optimizer.zero_grad()
    model(torch.randn(2, 1000)).mean().backward()
    optimizer.step()
    keep(model)
""",
        "held by other names",
    ),
    "the history of LBFGS": (
        ("TM408",),
        """
model = nn.Sequential(nn.Linear(2, 2000), nn.Tanh(), nn.Linear(2000, 2000), nn.Tanh(), nn.Linear(2000, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=60)
x = torch.rand(20, 2)
def closure():
    optimizer.zero_grad()
    loss = (model(x) - torch.sin(9 * x[:, :1])).pow(2).mean()
    loss.backward()
    return loss
optimizer.step(closure)  # <- cause
""",
        "optimizer state",
    ),
    "many turns of a cell, of which none is an earlier step": (
        HOST,
        """
class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(8, 256), nn.Linear(256, 1)
    def forward(self, x, state=None):
        state = self.cell(x, state)  # <- cause
        return self.out(state[0]), state
def loss_of(model, frames):
    state, loss = None, 0
    for x in frames:
        out, state = model(x, state)
        loss = loss + out.mean()
    return loss
model = Tracker()
optimizer = torch.optim.Adam(model.parameters())
loss_of(model, torch.randn(20, 3000, 8)).backward()
optimizer.step()
""",
        "in `cell`",
    ),
    "hooks that collect what layers give, by layer": (
        ("TM412",),
        """
from collections import defaultdict
features = defaultdict(list)
def keep_as(name):
    def hook(module, args, output):
        features[name].append(output.detach().clone())  # <- cause
    return hook
net = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 2))
net[0].register_forward_hook(keep_as("first"))
net[2].register_forward_hook(keep_as("second"))
with torch.no_grad():
    for _ in range(100):
        net(torch.randn(1000, 16))
""",
        "`features` has collected",
    ),
    "a callback that is called by its name, among others": (
        ("TM412",),
        """
class Silent:
    def on_batch_end(self, out): ...
class Metrics:
    def __init__(self):
        self.outputs = []
    def on_batch_end(self, out):
        self.add(out)  # with a graph that backward has freed
    def add(self, out):
        self.outputs.append(out)  # <- cause
class Engine:
    def __init__(self, callbacks):
        self.callbacks, self.model = callbacks, nn.Linear(16, 1024)
    def notify(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(*args)
    def fit(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(200):
            out = self.model(torch.randn(1000, 16))
            optimizer.zero_grad()
            out.mean().backward()
            optimizer.step()
            self.notify("on_batch_end", out)
engine = Engine([Silent(), Metrics()])
engine.fit()
""",
        "`engine.callbacks[1].outputs` has collected",
    ),
    "the history of LBFGS, when its closure goes backward": (
        ("TM408",),
        """
torch.set_num_threads(1)
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, -1))
image = nn.Parameter(torch.rand(2**20))
target = torch.rand(2**20)
optimizer = torch.optim.LBFGS([image], lr=0.7, max_iter=40, history_size=100)
def closure():
    optimizer.zero_grad()
    far = image - target
    loss = (far.pow(2) * (1 + 0.3 * torch.sin(7 * far))).mean() * 1e4
    loss.backward()
    return loss
for _ in range(10):
    optimizer.step(closure)  # <- cause
""",
        "the state of LBFGS needs",
    ),
    "a text that is generated, and given to the model as a whole": (
        ("TM411",),
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(100, 8), nn.Linear(8, 100)
    def forward(self, ids):
        h = self.table(ids)
        return self.out((h @ h.transpose(1, 2)).softmax(-1) @ h)
model = Attention()
ids = torch.zeros(2, 1, dtype=torch.long)
with torch.no_grad():
    while True:
        chosen = model(ids).argmax(-1)
        ids = torch.cat([ids, chosen[:, -1:].expand(-1, 500)], 1)  # <- cause
""",
        "`ids` grows in every iteration",
    ),
    "a giant among batches that are given by keyword": (
        ("TM406",),
        """
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 8)
    def forward(self, input_ids=None, labels=None):
        h = self.table(input_ids)
        return (h @ h.transpose(1, 2)).mean() - labels.mean()
model = Pairs()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in (10, 12, 9, 11, 12, 10, 9000):
    batch = {"input_ids": torch.zeros(2, length, dtype=torch.long), "labels": torch.ones(2)}
    loss = model(**batch)  # <- cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "this batch is [2, 9000], 750.0 times as large",
    ),
    "not the last output, which is small beside what is asked for": (
        HOST,
        """
net = nn.Linear(8, 1000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    out = net(torch.randn(1000, 8))
    optimizer.zero_grad()
    out.mean().backward()
    optimizer.step()
def confusion(classes):
    return F.one_hot(torch.arange(classes).repeat(40), classes)  # <- cause
confusion(1000)
""",
        "there is no memory for 305.2 MiB",
    ),
}


LONG = {"many turns of a cell, of which none is an earlier step"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in FAILURES]
)
def test_the_verdict_and_the_line(tmp_path: Path, name: str) -> None:
    codes, body, words = FAILURES[name]
    source = HEAD + body
    found = diagnosed(run_script(tmp_path, source))
    assert found.only.code in codes, found.stderr
    assert found.only.cause_location is not None
    assert found.only.cause_location.line == marked_line(source), found.stderr
    assert words in " ".join([found.only.message, *found.only.evidence]), found.stderr


def diagnosed(finished: Finished) -> Finished:
    """A run that ended as it would have without us, and in which nothing of ours went wrong."""
    assert finished.returncode == 1, finished.stderr
    assert "fault of its own" not in finished.stderr
    return finished


def test_what_fails_after_the_step_does_not_end_the_process_in_its_replay(tmp_path: Path) -> None:
    # The replay comes to its end in the middle of C++ that asks a fake for its device and bears no exception.
    source = """
import numpy as np
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(10, 8)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
np.ones(1 << 45)  # <- cause
"""
    found = diagnosed(run_script(tmp_path, source)).only
    assert found.code == "TM401"
    assert found.cause_location is not None
    assert found.cause_location.line == marked_line(source)
