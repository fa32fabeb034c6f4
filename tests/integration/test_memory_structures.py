"""Verdicts on memory in programs of other shapes: lists of images, many trainings in one run, distances by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from address_space import HEAD_WITH_ROOM, ran_out
from running import run_script

FAILURES: dict[str, tuple[tuple[str, ...], str]] = {
    "a list of images of which one is far larger": (
        ("TM406",),
        """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 32, 1)
    def forward(self, images):
        return [self.body(image[None]).mean() for image in images]
class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, at):
        return torch.rand(3, *((1500, 1200) if at == 25 else (20 + at, 20))), at
net = Detector()
room(150)
for images, _ in torch.utils.data.DataLoader(Photos(), 2, collate_fn=lambda items: tuple(zip(*items))):
    sum(net(images)).backward()  # <- cause
""",
    ),
    "optimizers of earlier tasks, of one trunk": (
        ("TM412",),
        """
trunk, optimizers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024)), {}
room(150)
for task in range(100):
    optimizer = torch.optim.Adam(trunk.parameters())
    for _ in range(2):
        trunk(torch.randn(8, 64)).mean().backward()
        optimizer.step()
    optimizers[task] = optimizer  # <- cause
""",
    ),
    "models of a search, whose optimizers are gone": (
        ("TM412",),
        """
def fit(seed):
    model = nn.Sequential(nn.Linear(16, 1000), nn.ReLU(), nn.Linear(1000, 1000))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(8, 16)).mean().backward()
        optimizer.step()
    return model
def search(results):
    for seed in range(200):
        results.append({"seed": seed, "model": fit(seed)})  # <- cause
room(150)
search([])
""",
    ),
    "a queue that two methods may fill, and one does": (
        ("TM412",),
        """
import queue
class Prefetcher:
    def __init__(self):
        self.ready = queue.Queue()
    def in_background(self):
        for _ in range(500):
            self.ready.put(torch.randn(64, 64, 64))
    def at_once(self):
        for _ in range(500):
            self.ready.put(torch.randn(64, 64, 64))  # <- cause
room(60)
Prefetcher().at_once()
""",
    ),
    "a table that is made, and then asked for once more": (
        ("TM414",),
        """
def scores(hidden):
    length = hidden.size(1)
    one, two = hidden[:, :, None].expand(-1, -1, length, -1), hidden[:, None].expand(-1, length, -1, -1)
    pairs = torch.cat([one, two], -1)  # <- cause
    return torch.tanh(pairs).mean()
layer = nn.Linear(8, 32)
room(120)
scores(layer(torch.randn(8, 200, 8))).backward()
""",
    ),
    "squared distances are meant": (
        ("TM414",),
        """
def distances(a, b):
    return a.pow(2).sum(1, keepdim=True) + b.pow(2).sum(1) - 2 * a @ b.t()  # <- cause
points = nn.Parameter(torch.randn(8000, 3))
room(150)
distances(points, torch.randn(8000, 3)).mean().backward()
""",
    ),
    "a sum in an attribute, to which the last update was before the last term": (
        ("TM403",),
        """
class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
        self.gap = 0.0
    def distance(self, x):
        return (self.net(x).mean(0) - self.net(-x).mean(0)).abs().mean()
    def update(self, x):
        self.optimizer.zero_grad()
        self.net(x).pow(2).mean().backward()
        self.optimizer.step()
    def fit(self):
        for _ in range(500):
            x = torch.randn(512, 64)
            self.update(x)
            self.gap += self.distance(x)  # <- cause
trainer = Trainer()
room(150)
trainer.fit()
""",
    ),
    "a rollout that is learned from at its end": (
        ("TM403",),
        """
import collections
class Agent:
    def __init__(self):
        self.body = nn.Sequential(nn.Linear(64, 1024), nn.Tanh())
        self.policy, self.value = nn.Linear(1024, 4), nn.Linear(1024, 1)
        self.memory = collections.deque(maxlen=1000)
    def act(self, seen):
        hidden = self.body(seen)
        chosen = torch.distributions.Categorical(logits=self.policy(hidden))
        action = chosen.sample()
        self.memory.append([chosen.log_prob(action), self.value(hidden).squeeze(-1)])  # <- cause
        return action
    def learn(self):
        sum((-known - value).mean() for known, value in self.memory).backward()
        self.memory.clear()
agent = Agent()
room(150)
for turn in range(1, 2000):
    agent.act(torch.randn(128, 64))
    if turn % 1000 == 0:
        agent.learn()
""",
    ),
    "results of an evaluation, collected with their graphs": (
        ("TM405",),
        """
net = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
def accuracy(batches):
    net.eval()
    outputs = []
    for x in batches:
        outputs.append(net(x))  # <- cause
    return torch.cat(outputs).argmax(1).float().mean().item()
room(150)
for epoch in range(2):
    net.train()
    net(torch.randn(8, 64)).pow(2).mean().backward()
    optimizer.step()
    accuracy(torch.randn(256, 64) for _ in range(400))
""",
    ),
    "a method that a loop of a library calls": (
        ("TM412",),
        """
import sched
class Validation:
    def __init__(self, net):
        self.net, self.probabilities = net, []
    @torch.no_grad()
    def step(self):
        found = self.net(torch.randn(256, 64)).softmax(1)
        self.probabilities.append(found)  # <- cause
validation, plan = Validation(nn.Linear(64, 4096)), sched.scheduler()
for turn in range(200):
    plan.enter(0, turn, validation.step)
room(150)
plan.run()
""",
    ),
    "the pair of a recurrent layer, carried on": (
        ("TM403",),
        """
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(16, 128, batch_first=True), nn.Linear(128, 8)
    def forward(self, x, state=None):
        found, state = self.rnn(x, state)
        return self.out(found), state
net, state = Reader(), None
room(120)
for part in range(2000):
    scores, state = net(torch.randn(16, 8, 16), state)  # <- cause
    scores.logsumexp(-1).mean().backward(retain_graph=True)
""",
    ),
}

ACCUMULATED = """
net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
room(120)
for step in range(10):
    losses = []
    for _ in range(500):
        losses.append(net(torch.randn(128, 64)).mean())
    torch.stack(losses).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("name", FAILURES)
def test_the_verdict_and_the_line(tmp_path: Path, name: str) -> None:
    codes, body = FAILURES[name]
    found = ran_out(tmp_path, body, codes)
    if found.code == "TM406":
        assert any("dataset item 25 is [3, 1500, 1200]" in each for each in found.evidence), found.evidence


def test_graphs_that_are_wanted_are_not_to_be_made_numbers(tmp_path: Path) -> None:
    found = run_script(tmp_path, HEAD_WITH_ROOM + ACCUMULATED).report.diagnoses[-1]

    advice = [each.title for each in found.treatments]
    assert any(each.startswith("go backward through each part by itself") for each in advice), advice
    assert not any(".item()" in each for each in advice), advice
