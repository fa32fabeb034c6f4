"""Who filled the memory, in loops of other shapes than those of the pages: the verdict, the name and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Finished, marked_line, run_script

HEAD = """
import resource
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 350 * 2**20, -1))
def net():
    return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Sigmoid(), nn.Linear(512, 1))
"""

# A card that cannot be asked, as the `meta` device: shapes and bytes, no values; it refuses in the words of CUDA.
CARD = """
import torch
from torch import nn
torch.manual_seed(0)
exec(compile('''
calls = 0
def card(after, asked, capacity, free, allocated, unallocated, more=""):
    global calls
    calls += 1
    if calls == after:
        raise torch.OutOfMemoryError(
            f"META out of memory. Tried to allocate {asked:.2f} MiB. GPU 0 has a total capacity of {capacity:.2f} MiB "
            f"of which {free:.2f} MiB is free. {more}Of the allocated memory {allocated:.2f} MiB is allocated by "
            f"PyTorch, and {unallocated:.2f} MiB is reserved by PyTorch but unallocated.")
''', "<card>", "exec"))
"""

FAILURES = {
    "a-method-that-logs": (
        "TM403",
        """
class Trainer:
    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.history = {"loss": [], "pred": []}
    def log(self, loss, pred):
        self.history["loss"].append(loss.item())
        self.history["pred"].append(pred)  # <- cause
    def fit(self):
        for i in range(100):
            self.optimizer.zero_grad()
            pred = self.model(torch.randn(4000, 16))
            loss = pred.square().mean()
            loss.backward(retain_graph=True)
            self.optimizer.step()
            self.log(loss, pred)
Trainer().fit()
""",
        "`self.history['pred']` keeps",
    ),
    "a-hook-that-collects": (
        "TM412",
        """
model = net()
acts = {}
def make(name):
    acts[name] = []
    def hook(module, given, result):
        acts[name].append(result)  # <- cause
    return hook
for name, child in model.named_children():
    child.register_forward_hook(make(name))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    optimizer.zero_grad()
    model(torch.randn(4000, 16)).square().mean().backward()
    optimizer.step()
""",
        "`acts` has collected",
    ),
    "a-sum-of-losses": (
        "TM403",
        """
model = net()
total = 0
for step in range(200):
    loss = model(torch.randn(4000, 16)).square().mean()
    total += loss  # <- cause
""",
        "`total` keeps",
    ),
    "losses-of-a-validation": (
        "TM403",
        """
class Trainer:
    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses = []
    def validate(self):
        for x in torch.randn(30, 3000, 16):
            self.losses.append(self.model(x).square().mean())  # <- cause
    def fit(self):
        for x in torch.randn(3, 200, 16):
            self.optimizer.zero_grad()
            self.model(x).mean().backward()
            self.optimizer.step()
        self.validate()
Trainer().fit()
""",
        "`self.losses` keeps",
    ),
    "exceptions-that-are-kept": (
        "TM403",
        """
model = net()
errors = []
def attempt(x):
    out = model(x)
    raise ValueError("skip this one")
for i in range(200):
    try:
        attempt(torch.randn(4000, 16))
    except ValueError as error:
        errors.append(error)  # <- cause
""",
        "`errors` keeps",
    ),
    "gradients-with-a-graph": (
        "TM403",
        """
import gc
gc.disable()
def train():
    for i in range(200):
        model = net()
        loss = model(torch.randn(4000, 16)).square().mean()
        loss.backward(create_graph=True)  # <- cause
train()
""",
        "the gradients keep",
    ),
    "pairs-one-line-earlier": (
        "TM404",
        """
model = nn.Linear(4, 1)
x, y = torch.randn(5000, 4), torch.randn(5000)
for i in range(3):
    error = model(x) - y  # <- cause
    loss = (error**2).mean() + error.abs().mean()
    loss.backward()
""",
        "[5000, 1] and [5000] broadcast to [5000, 5000]",
    ),
    "a-validation-function": (
        "TM405",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 512), *(nn.Tanh() for _ in range(20)))
        self.head = nn.Linear(512, 3)
    def forward(self, x):
        return self.head(self.body(x))
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
def validate(model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        out = model(x)  # <- cause
        right += (out.argmax(-1) == y).sum().item()
    return right
model = Net()
data = torch.utils.data.TensorDataset(torch.randn(12000, 16), torch.randint(0, 3, (12000,)))
loader = torch.utils.data.DataLoader
train(model, torch.optim.Adam(model.parameters()), loader(data, batch_size=100, sampler=range(500)))
validate(model, loader(data, batch_size=12000))
""",
        "for a backward that never happens",
    ),
    "a-step-that-fakes-cannot-follow": (
        "TM414",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 512)
    def forward(self, x):
        h = self.first(x)
        for _ in range(40 if h.abs().mean().item() > -1 else 0):
            h = torch.tanh(h)  # <- cause
        return h
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(12000, 16)).mean().backward()
    optimizer.step()
""",
        "there is no memory for",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_verdict_and_the_line(tmp_path: Path, name: str) -> None:
    code, body, words = FAILURES[name]
    source = HEAD + body
    finished = run_script(tmp_path, source)
    found = finished.only
    place = found.cause_location
    assert place is not None, finished.stderr
    assert (found.code, place.line) == (code, marked_line(source)), finished.stderr
    assert words in found.message
    assert "fault of its own" not in finished.stderr
    record = autopsy_in(finished)
    assert record["total"] == sum(record["rows"].values())
    expected = "live graph" if name == "a-step-that-fakes-cannot-follow" else None
    assert expected is None or (
        record["method"] == expected and any("fake tensors do not have" in fact for fact in found.evidence)
    )


def autopsy_in(finished: Finished) -> dict[str, Any]:
    lines = (finished.run / "rank0" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return next(event for event in events if event["kind"] == "memory-autopsy")


TRAINING = (
    CARD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 1024, device="meta")
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(8))
    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))  # <- cause
            card(*REFUSAL)
        return h
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(2048, 64, device="meta")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""
)


def test_a_table_of_a_device_adds_up_to_what_its_allocator_says(tmp_path: Path) -> None:
    # In the second step, after six of eight layers: weights, the batch, and what went into and came out of the layers.
    weights = 4 * (64 * 1024 + 1024 + 8 * (1024 * 1024 + 1024))
    kept = 2048 * 64 * 4 + 7 * 2048 * 1024 * 4
    allocated = (weights + kept) / 2**20
    source = f"REFUSAL = (14, 30, 200, 20, {allocated}, 10)\n" + TRAINING
    finished = run_script(tmp_path, source)
    found = finished.only
    assert (found.code, found.cause_location.line) == ("TM402", marked_line(source)), finished.stderr
    record = autopsy_in(finished)
    rows = record["rows"]
    assert rows["parameters"] == weights
    assert abs(rows["saved activations"] - kept) < 0.02 * kept, rows
    assert rows.get("not accounted for", 0) < 0.02 * record["total"], rows
    assert rows["reserved by the allocator, not in use"] == 10 << 20
    assert record["total"] == pytest.approx(180 << 20, rel=0.02)
    assert record["lines"][0]["line"] == marked_line(source)
    assert record["method"] == "fake replay"
    assert "there is no memory for 30.0 MiB on meta:0" in found.message


def test_a_step_that_ran_on_a_default_device_is_played_on_it(tmp_path: Path) -> None:
    head, _, loop = TRAINING.replace(', device="meta"', "").partition("model = Net()\n")
    body = "".join(f"    {line}\n" for line in f"model = Net()\n{loop}".splitlines())
    source = f'REFUSAL = (14, 30, 200, 20, 100, 10)\n{head}with torch.device("meta"):\n{body}'
    finished = run_script(tmp_path, source)
    record = autopsy_in(finished)
    assert record["method"] == "fake replay", finished.stderr
    assert record["lines"][0]["line"] == marked_line(source)


def test_free_memory_in_pieces_and_memory_of_others_are_told_apart(tmp_path: Path) -> None:
    split = "REFUSAL = (3, 20, 200, 5, 100, 80)\n" + TRAINING
    assert run_script(tmp_path, split).only.code == "TM407"
    words = "Process 77 has 150.00 MiB memory in use. Including non-PyTorch memory, this process has 40.00 MiB in use. "
    shared = f"REFUSAL = (3, 20, 200, 5, 35, 0, {words!r})\n" + TRAINING
    other = tmp_path / "other"
    other.mkdir()
    found = run_script(other, shared).only
    assert found.code == "TM410"
    assert "process 77 holds 150.0 MiB" in found.evidence
