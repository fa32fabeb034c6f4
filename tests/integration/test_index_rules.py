"""Labels, indices, values, devices, memory: what is out of bounds, by how much, and who set the bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, run_script

HEAD = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

"""

# name -> (code, script, words of the message, words of the rest)
FAILURES = {
    "segmentation-with-255": (
        "TM301",
        """
class Masks(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        mask = torch.zeros(6, 6, dtype=torch.long)
        if i == 5:
            mask[0] = 255
        return torch.randn(3, 6, 6), mask
net = nn.Conv2d(3, 4, 1)
def loss_of(logits, mask, weight):
    return F.cross_entropy(logits, mask, weight=weight)  # <- cause
for x, mask in DataLoader(Masks(), batch_size=4, shuffle=True, num_workers=2):
    loss_of(net(x), mask, torch.ones(4)).backward()
""",
        "label 255 (6 times) is out of range: there are 4 classes",
        ("dataset item 5", "ignore_index=255", "nn.Conv2d(3, 4, 1)"),
    ),
    "trainer-with-labels-from-1": (
        "TM301",
        """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    def loss(self, x, y):
        out = self.model(x)
        return self.criterion(out, y)  # <- cause
    def fit(self):
        self.loss(torch.randn(16, 4), torch.arange(16) % 3 + 1).backward()
Trainer().fit()
""",
        "label 3 (5 times)",
        ("start at 1", "subtract 1", "nn.Linear(8, 3)"),
    ),
    "next-token": (
        "TM301",
        """
tokens = torch.randint(0, 20, (12, 9), generator=torch.Generator().manual_seed(0))
tokens[7, 4] = 20  # <- cause
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(21, 8)
        self.head = nn.Linear(8, 20, bias=False)
    def forward(self, x, y):
        logits = self.head(self.embed(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))
model = Model()
for (t,) in DataLoader(TensorDataset(tokens), batch_size=4):
    model(t[:, :-1], t[:, 1:]).backward()
""",
        "label 20 is out of range: there are 20 classes",
        ("dataset item 7", "nn.Linear(8, 20, bias=False)"),
    ),
    "functional-gradient": (
        "TM301",
        """
model = nn.Linear(3, 4)
def loss(parameters, x, y):
    return F.cross_entropy(torch.func.functional_call(model, parameters, x), y)  # <- cause
torch.func.grad(loss)(dict(model.named_parameters()), torch.randn(2, 3), torch.tensor([1, 9]))
""",
        "label 9",
        ("`y[1]`",),
    ),
    "embedding-of-a-batch": (
        "TM302",
        """
class Text(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return {"ids": torch.arange(4) + (30 if i == 11 else 0), "y": i % 2}
class Net(nn.Module):
    def __init__(self, vocabulary=20):
        super().__init__()
        self.token = nn.Embedding(vocabulary, 8)
    def forward(self, ids):
        return self.token(ids).mean(1)  # <- cause
net = Net()
for batch in DataLoader(Text(), batch_size=4, shuffle=True):
    net(batch["ids"]).sum().backward()
""",
        "4 indices are out of range: the `Embedding` has 20 rows",
        ("dataset item 11", "nn.Embedding(vocabulary, 8)", "34 rows"),
    ),
    "gather": (
        "TM302",
        """
def pick(scores, y):
    return -scores.gather(1, y.unsqueeze(1)).mean()  # <- cause
pick(torch.randn(4, 3, requires_grad=True).log_softmax(-1), torch.tensor([0, 1, 2, 3]))
""",
        "index 3 is out of range: dimension 1 of [4, 3] has size 3",
        (),
    ),
    "fancy-index": (
        "TM302",
        """
scores = torch.randn(4, 3, requires_grad=True).log_softmax(-1)
y = torch.tensor([0, 1, 2, 3])
loss = -scores[range(len(y)), y].mean()  # <- cause
""",
        "dimension 1 of [4, 3]",
        ("`y[3]` is 3",),
    ),
    "store": (
        "TM302",
        """
x = torch.zeros(4, 3)
y = torch.tensor([0, 1, 2, 3])
x[torch.arange(4), y] = 1.0  # <- cause
""",
        "index 3",
        (),
    ),
    "one-hot": (
        "TM302",
        """
y = torch.tensor([0, 1, -1, 3])
t = F.one_hot(y)  # <- cause
""",
        "index -1 is out of range",
        ("marker for padding",),
    ),
    "probabilities-of-a-policy": (
        "TM303",
        """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.sigma = nn.Linear(3, 2), nn.Linear(3, 2)
    def forward(self, x):
        mu, sigma = self.mu(x), self.sigma(x)
        return torch.distributions.Normal(mu, sigma)  # <- cause
torch.manual_seed(0)
Policy()(torch.randn(8, 3)).rsample()
""",
        "as `scale`, which must be above 0",
        ("softplus", "`addmm`"),
    ),
    "layers-in-a-list": (
        "TM310",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = [nn.Linear(4, 4) for _ in range(3)]  # <- cause
    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x
Net().to("meta")(torch.randn(2, 4, device="meta"))
""",
        "`weight` is on cpu, `x` on meta",
        ("plain list", "nn.ModuleList"),
    ),
    "result-of-to-dropped": (
        "TM310",
        """
device = torch.device("meta")
model = nn.Linear(4, 2).to(device)
for x, y in DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, 2)), batch_size=4):
    x.to(device)  # <- cause
    loss = F.mse_loss(model(x), y)
""",
        "`x` is on cpu",
        ("which is dropped", "x = x.to(device)"),
    ),
    "made-in-forward": (
        "TM310",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        noise = torch.randn(2, 4) * 0.1  # <- cause
        return self.linear(x) + noise
Net().to("meta")(torch.randn(2, 4, device="meta"))
""",
        "`noise` is on cpu",
        ("without `device=`",),
    ),
    "target-not-moved": (
        "TM310",
        """
model = nn.Linear(4, 2).to("meta")
def step(x, y):
    out = model(x.to("meta"))
    return F.cross_entropy(out, y)  # <- cause
for x, y in DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4):
    step(x, y)
""",
        "`y` is on cpu, `out` on meta",
        ("comes from the DataLoader",),
    ),
    "kept-with-their-graphs": (
        "TM403",
        """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
kept = []
for step in range(10000):
    x = torch.randn(1000, 1000, requires_grad=True)
    kept.append((x * 2).exp())  # <- cause
""",
        "`kept` keeps",
        ("built before this step",),
    ),
    "loss-of-two-shapes": (
        "TM404",
        """
net = nn.Linear(3, 1)
x, y = torch.randn(2**22, 3), torch.randn(2**22)
loss = F.mse_loss(net(x), y)  # <- cause
""",
        "[4194304, 1] and [4194304] broadcast to [4194304, 4194304]",
        (),
    ),
    "identity-of-many": (
        "TM401",
        """
class Graph:
    def __init__(self, n):
        self.n = n
    def build(self):
        return torch.eye(self.n, dtype=torch.float64)  # <- cause
Graph(6 * 10**6).build()
""",
        "261.9 TiB, a tensor of [6000000, 6000000]",
        (),
    ),
    "checkpoint-larger-than-allowed": (
        "TM830",
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, -1))
def save(model):
    torch.save({"model": model.state_dict()}, "checkpoint.pt")  # <- cause
save(nn.Linear(1000, 1000))
""",
        "`checkpoint.pt` could not be written",
        ("3.8 MiB of tensors", "incomplete"),
    ),
    "output-on-a-full-disk-beside-a-file-with-room": (
        "TM830",
        """
import os, sys
log = open("log.txt", "w")
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
for step in range(3):
    log.write("a line")
    print("a line", flush=True)  # <- cause
""",
        "`/dev/full` could not be written",
        (),
    ),
    "forward-of-itself": (
        "TM840",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        x = self.linear(x)
        return self(x)  # <- cause
Net()(torch.randn(1, 2))
""",
        "`forward` calls itself without end",
        ("same `Net` object",),
    ),
    "getattr": (
        "TM840",
        """
class Config:
    def __getattr__(self, name):
        return self.values[name]  # <- cause
print(Config().lr)
""",
        "`__getattr__` calls itself without end",
        (),
    ),
    "two-functions": (
        "TM840",
        """
def encode(x):
    return decode(x * 2)
def decode(x):
    return encode(x / 2)  # <- cause
encode(torch.ones(2))
""",
        "through `decode`",
        (),
    ),
    "linked-list": (
        "TM840",
        """
import copy
class Link:
    def __init__(self, before):
        self.before = before
last = None
for _ in range(900):
    last = Link(last)
copy.deepcopy(last)  # <- cause
""",
        "a chain of `Link` objects",
        ("as `before`", "`deque`"),
    ),
    "labels-that-losses-leave-out": (
        "TM302",
        """
scores = torch.randn(4, 6, requires_grad=True)
labels = torch.tensor([1, -100, 3, 5])
kept = labels != -100
chosen = scores.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)  # <- cause
(-chosen * kept).sum().backward()
""",
        "index -100",
        ("ignore_index", "mask the result"),
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_bound_and_who_broke_it(tmp_path: Path, name: str) -> None:
    code, body, words, rest = FAILURES[name]
    source = HEAD + body

    finished = run_script(tmp_path, source)
    found = finished.only
    place = found.cause_location
    assert place is not None, finished.stderr
    assert (found.code, place.file, place.line) == (code, "train.py", marked_line(source)), finished.stderr
    assert words in found.message
    told = [found.cause, *found.evidence, *(each.title for each in found.treatments)]
    told += [text for location in found.locations for text in (location.label, location.code)]
    for part in rest:
        assert any(part in text for text in told), f"{part!r} is not in {told}"
    assert "fault of its own" not in finished.stderr


# Plain mistakes that only sound alike: no rule of these families may claim them.
OTHERS = {
    "list-index": "[1, 2][5]",
    "numpy-index": "import numpy as np\nnp.zeros(3)[5]",
    "missing-key": "{}['label']",
    "memory-error-of-the-user": "raise MemoryError('my own')",
    "too-many-samples": "torch.multinomial(torch.tensor([0.5, 0.5]), 3)",
    "missing-folder": "torch.save(torch.zeros(3), '/nonexistent/x.pt')",
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_sounds_alike_is_not_claimed(tmp_path: Path, name: str) -> None:
    finished = run_script(tmp_path, HEAD + OTHERS[name] + "\n")

    assert finished.only.code == "TM900", finished.stderr
