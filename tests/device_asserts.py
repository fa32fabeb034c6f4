"""Scripts whose GPU dies of a failed check: kinds of mistakes, each of which can be put into loops of many shapes.

On a machine with no GPU the device is `meta`: like a GPU it has shapes and no values to look at, and work on it goes on
past a mistake. `surface` then raises what CUDA would, in the step in which it would, if it is given a result of it.
"""

from __future__ import annotations

HEADER = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "meta")
BAD_ITEM, BATCH = 21, 8


def surface(step, result):
    if result.device.type == "meta" and step == BAD_ITEM // BATCH:
        raise RuntimeError("CUDA error: device-side assert triggered")
"""

# name -> (code of the diagnosis, source). Each defines Net, `criterion(out, y)` and tensors `inputs`, `targets`.
KINDS: dict[str, tuple[str, str]] = {
    "label": (
        "TM301",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.body(x)


def criterion(out, y):
    return F.cross_entropy(out, y)


inputs, targets = torch.randn(48, 6), torch.randint(0, 4, (48,))
targets[BAD_ITEM] = 4  # <- cause
""",
    ),
    "pixel label": (
        "TM301",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.conv(x)


whole = nn.CrossEntropyLoss()


def criterion(out, y):
    total = whole(out, y)  # <- cause
    return total


inputs, targets = torch.randn(48, 3, 4, 4), torch.randint(0, 5, (48, 4, 4))
targets[BAD_ITEM, 2, 3] = 255
""",
    ),
    "token": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.tokens(x)
        return self.head(h.mean(1))


def criterion(out, y):
    return F.cross_entropy(out, y)


inputs, targets = torch.randint(0, 30, (48, 5)), torch.randint(0, 3, (48,))
inputs[BAD_ITEM, 3] = 30  # <- cause
""",
    ),
    "gather": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 4)

    def forward(self, x):
        return self.q(x)


def criterion(out, y):
    chosen = out.gather(1, y[:, None])  # <- cause
    return (chosen - 1).square().mean()


inputs, targets = torch.randn(48, 6), torch.randint(0, 4, (48,))
targets[BAD_ITEM] = -1
""",
    ),
    "scatter": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x):
        return self.a(x).log_softmax(-1)


def criterion(out, y):
    soft = torch.zeros_like(out).scatter_(1, y.unsqueeze(1), 0.9)  # <- cause
    return -(soft * out).sum(-1).mean()


inputs, targets = torch.randn(48, 6), torch.randint(0, 4, (48,))
targets[BAD_ITEM] = 7
""",
    ),
    "brackets": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        rows = self.table[x]  # <- cause
        return self.head(rows).squeeze(-1)


def criterion(out, y):
    return F.mse_loss(out, y)


inputs, targets = torch.randint(0, 10, (48,)), torch.randn(48)
inputs[BAD_ITEM] = 12
""",
    ),
    "one hot": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x):
        return self.a(x)


def criterion(out, y):
    wanted = F.one_hot(y, 4).float()  # <- cause
    return F.binary_cross_entropy_with_logits(out, wanted)


inputs, targets = torch.randn(48, 6), torch.randint(0, 4, (48,))
targets[BAD_ITEM] = 5
""",
    ),
    "rows": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Parameter(torch.randn(9, 6))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        picked = torch.index_select(self.nodes, 0, x.flatten())  # <- cause
        return self.out(picked.view(*x.shape, -1)).mean((1, 2))


def criterion(out, y):
    return F.mse_loss(out, y)


inputs, targets = torch.randint(0, 9, (48, 2)), torch.randn(48)
inputs[BAD_ITEM, 1] = 9
""",
    ),
    "distance": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.far = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        span = x.amax(1) - x.amin(1)
        h = self.words(x).mean(1)
        h = h + self.far(span)  # <- cause
        return self.head(h)


def criterion(out, y):
    return F.cross_entropy(out, y)


inputs, targets = torch.randint(5, 24, (48, 8)), torch.randint(0, 3, (48,))
inputs[BAD_ITEM, 2:4] = torch.tensor([0, 29])
""",
    ),
    "bag": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 8, mode="mean")
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.bag(x))


def criterion(out, y):
    return F.cross_entropy(out, y)


inputs, targets = torch.randint(0, 40, (48, 4)), torch.randint(0, 2, (48,))
inputs[BAD_ITEM, 0] = 41  # <- cause
""",
    ),
    "scores as probabilities": (
        "TM303",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 16)
        self.b = nn.Linear(16, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def criterion(out, y):
    return F.binary_cross_entropy(out, y)  # <- cause


inputs, targets = torch.randn(48, 6), torch.rand(48, 3).round()
""",
    ),
    "add to rows": (
        "TM302",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x):
        return self.a(x)


def criterion(out, y):
    pooled = out.new_zeros(5, 4)
    pooled = pooled.index_add(0, y, out)  # <- cause
    return pooled.square().mean()


inputs, targets = torch.randn(48, 6), torch.randint(0, 5, (48,))
targets[BAD_ITEM] = 6
""",
    ),
}

SHAPES: dict[str, str] = {
    "plain loop": """
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)):
    x, y = x.to(device), y.to(device)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    surface(step, loss)
    optimizer.step()
""",
    "function and item": """
def train_step(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=True)
    out = model(x.to(device, non_blocking=True))
    loss = criterion(out, y.to(device, non_blocking=True))
    loss.backward()
    optimizer.step()
    return loss


def main():
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = 0.0
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, pin_memory=device.type == "cuda")
    for step, (x, y) in enumerate(loader):
        loss = train_step(model, optimizer, x, y)
        surface(step, loss)
        if device.type == "cuda":
            total += loss.item()


main()
""",
    "trainer class": """
class Trainer:
    def __init__(self, model):
        self.model = model.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.history = []

    def prepare(self, batch):
        return [part.to(device) for part in batch]

    def step(self, batch, number):
        x, y = self.prepare(batch)
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = criterion(out, y)
        loss.backward()
        surface(number, loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def fit(self, loader):
        for number, batch in enumerate(loader):
            self.history.append(self.step(batch, number))


Trainer(Net()).fit(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH))
""",
    "closure": """
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, batch in enumerate(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)):
    x, y = (part.to(device) for part in batch)

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        surface(step, loss)
        return loss

    optimizer.step(closure)
""",
    "accumulation": """
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
for step, (x, y) in enumerate(loader):
    loss = criterion(model(x.to(device)), y.to(device)) / 3
    loss.backward()
    if (step + 1) % 3 == 0:
        surface(step, loss)
        optimizer.step()
        optimizer.zero_grad()
""",
    "validation": """
def evaluate(model, loader):
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for step, (x, y) in enumerate(loader):
            x = x.to(device)
            y = y.to(device)
            total += criterion(model(x), y)
            surface(step, total)
            if device.type == "cuda":
                float(total)
    return total


print(evaluate(Net().to(device), DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)).shape)
""",
    "iterator": """
model = Net()
model = model.cuda() if device.type == "cuda" else model.to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
batches = iter(loader)
step = 0
while step < 6:
    try:
        x, y = next(batches)
    except StopIteration:
        break
    optimizer.zero_grad()
    loss = criterion(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    surface(step, loss)
    step += 1
if device.type == "cuda":
    torch.cuda.synchronize()
""",
    "mixed precision": """
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)):
    x, y = x.to(device), y.to(device)
    with torch.autocast(device.type if device.type == "cuda" else "cpu", enabled=device.type == "cuda"):
        out = model(x)
    loss = criterion(out.float(), y)
    scaler.scale(loss).backward()
    surface(step, loss)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "moved by the loader": """
class OnDevice:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield {"x": batch[0].to(device), "y": batch[1].to(device)}


class Loop:
    def __init__(self):
        self.net = Net().to(device)
        self.opt = torch.optim.Adam(self.net.parameters())

    def run(self):
        for step, batch in enumerate(OnDevice(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH))):
            loss = self.loss(batch)
            self.opt.zero_grad()
            loss.backward()
            surface(step, loss)
            self.opt.step()

    def loss(self, batch):
        return criterion(self.net(batch["x"]), batch["y"])


Loop().run()
""",
    "two optimizers": """
class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, z):
        return self.net(z)


model, other = Net().to(device), Other().to(device)
first = torch.optim.Adam(model.parameters(), lr=1e-3)
second = torch.optim.Adam(other.parameters(), lr=1e-3)
for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)):
    z = torch.randn(4, 2, device=device)
    second.zero_grad()
    other(z).square().mean().backward()
    second.step()
    first.zero_grad()
    loss = criterion(model(x.to(device)), y.to(device))
    loss.backward()
    surface(step, loss)
    first.step()
""",
    "default device": """
if device.type == "cuda":
    torch.set_default_device(device)
with device:
    model = Net()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator(device=device) if device.type == "cuda" else None
loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH, generator=generator)
for step, (x, y) in enumerate(loader):
    x, y = x.to(device), y.to(device)
    noise = torch.rand(3, device=device, generator=generator)
    loss = criterion(model(x), y) + 0 * noise.sum()
    optimizer.zero_grad()
    loss.backward()
    surface(step, loss)
    optimizer.step()
""",
    "streams and events": """
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
side = torch.cuda.Stream() if device.type == "cuda" else None
for epoch in range(1):
    for step, (x, y) in enumerate(DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)):
        if side is not None:
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            with torch.cuda.stream(side):
                x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
        else:
            x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        surface(step, loss)
        if side is not None:
            torch.cuda.synchronize()
""",
}


def program(kind: str, shape: str) -> str:
    return HEADER + KINDS[kind][1] + SHAPES[shape]


# Every kind in some shape and every shape with some kind; a second round pairs them differently.
PAIRS = [
    (kind, shape)
    for shift in (0, 5)
    for kind, shape in zip(KINDS, [*list(SHAPES)[shift:], *list(SHAPES)[:shift]], strict=True)
]
