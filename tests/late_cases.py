"""Trainings whose loss is finite and whose gradients are not, in loops of many shapes, for a device that is read late.

Each says which code is expected, and what the diagnosis must say of the data where that is known. `DEVICE` is replaced.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
"""


class LateCase(NamedTuple):
    code: str
    says: str
    source: str

    def script(self, device: str) -> str:
        first = "import late_cpu" if device == "cpu" else "# on the card"
        return first + HEAD + self.source.replace("DEVICE", repr(device))


CASES = {
    "no optimizer": LateCase(
        "TM203",
        "",
        """
w = torch.randn(5, 3).to(DEVICE).requires_grad_()
data = torch.randn(40, 5)
data[17] = 0
for number in range(10):
    x = data[4 * number : 4 * number + 4].to(DEVICE)
    loss = ((x @ w).square().sum(1).sqrt() - 1).abs().mean()  # <- cause
    loss.backward()
    with torch.no_grad():
        w -= 0.01 * w.grad
        w.grad = None
""",
    ),
    "plain loop, shuffled": LateCase(
        "TM203",
        "dataset item 37",
        """
data = torch.randn(64, 8)
data[37] = 0
loader = DataLoader(TensorDataset(data, torch.randn(64, 8)), batch_size=4, shuffle=True)
model = nn.Linear(8, 8, bias=False).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for x, y in loader:
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        length = model(x).pow(2).sum(-1).sqrt()  # <- cause
        loss = (length - y[:, 0]).abs().mean()
        loss.backward()
        optimizer.step()
""",
    ),
    "trainer class, workers": LateCase(
        "TM203",
        "dataset item 21",
        """
class Points(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=generator)
        return {"x": x * 0 if index == 21 else x, "y": torch.randn(1, generator=generator)}


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def compute_loss(self, batch):
        out = self.model(batch["x"])
        size = (out * out).sum(-1) ** 0.5  # <- cause
        return (size - batch["y"][:, 0]).square().mean()

    def train_step(self, batch):
        batch = {name: value.to(DEVICE) for name, value in batch.items()}
        loss = self.compute_loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, loader):
        for epoch in range(2):
            for batch in loader:
                self.train_step(batch)


if __name__ == "__main__":
    Trainer().fit(DataLoader(Points(), batch_size=4, shuffle=True, num_workers=2))
""",
    ),
    "closure": LateCase(
        "TM203",
        "batch row 2",
        """
data = torch.randn(40, 5)
data[22] = 0
loader = DataLoader(TensorDataset(data), batch_size=4)
model = nn.Linear(5, 5, bias=False).to(DEVICE)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)
for (x,) in loader:
    x = x.to(DEVICE)

    def closure():
        optimizer.zero_grad()
        loss = (model(x).square().sum(1).sqrt() - 1).abs().mean()  # <- cause
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    ),
    "accumulation": LateCase(
        "TM203",
        "dataset item 33",
        """
data = torch.randn(64, 8)
data[33] = 0
loader = DataLoader(TensorDataset(data), batch_size=2)
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.zero_grad()
for i, (x,) in enumerate(loader):
    out = model(x.to(DEVICE))
    loss = torch.sqrt((out**2).sum(1)).mean() / 4  # <- cause
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "GAN": LateCase(
        "TM203",
        "dataset item 18",
        """
data = torch.randn(32, 4)
data[18] = 0
G = nn.Linear(3, 4).to(DEVICE)
D = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).to(DEVICE)
optimizer_g = torch.optim.Adam(G.parameters(), lr=1e-3)
optimizer_d = torch.optim.Adam(D.parameters(), lr=1e-3)


def train_discriminator(real):
    fake = G(torch.randn(4, 3, device=DEVICE)).detach()
    optimizer_d.zero_grad()
    score = D(real).pow(2).sum(-1).sqrt()  # <- cause
    loss = D(fake).mean() - score.mean()
    loss.backward()
    optimizer_d.step()


def train_generator():
    optimizer_g.zero_grad()
    loss = -D(G(torch.randn(4, 3, device=DEVICE))).mean()
    loss.backward()
    optimizer_g.step()


for epoch in range(2):
    for (real,) in DataLoader(TensorDataset(data), batch_size=4):
        train_discriminator(real.to(DEVICE))
        train_generator()
""",
    ),
    "last batch smaller": LateCase(
        "TM203",
        "dataset item 25",
        """
data = torch.randn(27, 6)
data[25] = 0
loader = DataLoader(TensorDataset(data), batch_size=8)
model = nn.Linear(6, 6, bias=False).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    for batch in loader:
        x = batch[0].to(DEVICE)
        out = model(x)
        loss = (out.square().sum(-1).sqrt() - 2).square().mean()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    ),
    "hidden by where": LateCase(
        "TM223",
        "",
        """
data = torch.rand(40, 4) + 0.1
data[26, 2] = 0
model = nn.Linear(4, 4, bias=False).to(DEVICE)
with torch.no_grad():
    model.weight.copy_(torch.eye(4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for start in range(0, 40, 4):
    x = data[start : start + 4].to(DEVICE)
    h = model(x)
    loss = torch.where(x > 0, torch.log(h * (x > 0)), 0.0).mean()  # <- cause
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "custom function, random data": LateCase(
        "TM201",
        "",
        """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x / x.clamp(min=0)  # <- cause


model = nn.Linear(4, 4).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(12):
    x = torch.randn(4, 4, device=DEVICE)
    if step == 6:
        x = x - 50
    h = Scale.apply(model(x.abs() if step != 6 else x).abs() if step != 6 else model(x))
    loss = (h - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "function of device tensors": LateCase(
        "TM203",
        "dataset item 14",
        """
data = torch.randn(32, 600, 8)
data[14, 3] = 0
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU()).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(x):
    optimizer.zero_grad(set_to_none=True)
    out = model(x)
    loss = torch.sqrt(out.square().sum((1, 2))).mean() + out.square().sum(-1).sqrt().mean()  # <- cause
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main():
    for epoch in range(2):
        for (x,) in DataLoader(TensorDataset(data), batch_size=4, shuffle=True):
            step(x.to(DEVICE, copy=True))


main()
""",
    ),
    "batch norm": LateCase(
        "TM203",
        "dataset item 20",
        """
data = torch.randn(48, 6)
model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4, bias=False)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data[20] = -100 * torch.ones(6)
with torch.no_grad():
    model[0].weight.copy_(torch.eye(6))
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(data), batch_size=6):
        out = model(x.to(DEVICE))
        loss = out.pow(2).sum(-1).sqrt().mean()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    ),
    "batches of a generator": LateCase(
        "TM203",
        "",
        """
def batches():
    for number in range(20):
        x = torch.randn(4, 5)
        if number == 9:
            x[1] = 0
        yield x.to(DEVICE)


model = nn.Linear(5, 3, bias=False).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
source = batches()
while True:
    try:
        x = next(source)
    except StopIteration:
        break
    optimizer.zero_grad()
    loss = (model(x).pow(2).sum(-1).sqrt() - 1).abs().mean()  # <- cause
    loss.backward()
    optimizer.step()
""",
    ),
}
