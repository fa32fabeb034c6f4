"""Ways to write a training loop. Each takes the model, the loss and the data that a failure defines.

A failure (failures.py) gives `Net`, `criterion(out, y)` and `spoil(x, y)`; a shape decides who calls them, from where.
"""

PRELUDE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def make_data(rows=48):
    x = torch.randn(rows, 8)
    y = torch.randint(0, 4, (rows,))
    spoil(x, y)
    return x, y

"""

SHAPES = {
    "module-level": """
x, y = make_data()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for start in range(0, 48, 8):
    out = model(x[start : start + 8])
    loss = criterion(out, y[start : start + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "main-with-loader": """
from torch.utils.data import DataLoader, TensorDataset


def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=8, shuffle=True)
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
""",
    "trainer-class": """
class Trainer:
    def __init__(self, model, lr=0.01):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.history = []

    def compute_loss(self, batch):
        inputs, targets = batch
        return criterion(self.model(inputs), targets)

    def training_step(self, batch):
        self.model.train()
        loss = self.compute_loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())

    def fit(self, batches):
        for batch in batches:
            self.training_step(batch)


x, y = make_data()
Trainer(Net()).fit([(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)])
""",
    "split-functions": """
def forward_pass(model, batch):
    return criterion(model(batch[0]), batch[1])


def backward_pass(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()


def update(optimizer, model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()


def run():
    x, y = make_data()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for chunk in zip(x.split(8), y.split(8)):
        loss = forward_pass(model, chunk)
        backward_pass(loss, optimizer)
        update(optimizer, model)


run()
""",
    "lbfgs-closure": """
x, y = make_data()
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)
for epoch in range(2):

    def closure():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
""",
    "two-optimizers": """
class Pair:
    def __init__(self):
        self.net, self.critic = Net(), nn.Linear(4, 1)
        self.opt_net = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def step(self, x, y):
        with torch.no_grad():
            fake = torch.randn(x.shape[0], 4)
        critic_loss = self.critic(fake).square().mean()
        self.opt_critic.zero_grad()
        critic_loss.backward()
        self.opt_critic.step()

        out = self.net(x)
        net_loss = criterion(out, y) + 0.1 * self.critic(torch.ones(x.shape[0], 4)).mean()
        self.opt_net.zero_grad()
        net_loss.backward()
        self.opt_net.step()


pair = Pair()
x, y = make_data()
for i in range(0, 48, 8):
    pair.step(x[i : i + 8], y[i : i + 8])
""",
    "accumulation": """
from torch.utils.data import DataLoader, TensorDataset


def train(model, loader, accumulate=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


train(Net(), DataLoader(TensorDataset(*make_data()), batch_size=8))
""",
    "while-next": """
from torch.utils.data import DataLoader, TensorDataset

model = Net()
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(*make_data()), batch_size=8, shuffle=True)
iterator = iter(loader)
step = 0
while step < 8:
    try:
        inputs, targets = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        inputs, targets = next(iterator)
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = criterion(outputs, targets)
    loss.backward()
    optimizer.step()
    step += 1
""",
    "generator": """
def steps(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.detach()


x, y = make_data()
model = Net()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for loss in steps(model, optimizer, zip(x.split(8), y.split(8))):
    value = float(loss)
""",
    "try-except": """
def train():
    x, y = make_data()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    skipped = 0
    for epoch in range(2):
        for i in range(0, 48, 8):
            try:
                xb, yb = x[i : i + 8], y[i : i + 8]
                loss = criterion(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            except KeyboardInterrupt:
                skipped += 1
                break


train()
""",
    "wrapped-module": '''
class System(nn.Module):
    """Model and loss in one module, as many code bases do it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict({"main": Net()})

    def forward(self, batch):
        out = self.backbone["main"](batch["x"])
        return {"loss": criterion(out, batch["y"]), "out": out}


class Engine:
    def __init__(self, system):
        self.system = system
        self.optimizer = torch.optim.AdamW(system.parameters(), lr=1e-3)

    def __call__(self, batches):
        for batch in batches:
            result = self.system(batch)
            result["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


x, y = make_data()
Engine(System())([{"x": x[i : i + 8], "y": y[i : i + 8]} for i in range(0, 48, 8)])
''',
    "argparse-dataclass": """
import argparse
from dataclasses import dataclass


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    return parser.parse_args()


def fit(state, data):
    def one(inputs, targets):
        loss = criterion(state.model(inputs), targets)
        loss.backward()
        return loss

    for inputs, targets in data:
        state.optimizer.zero_grad()
        one(inputs, targets)
        state.optimizer.step()
        state.step += 1


if __name__ == "__main__":
    args = parse()
    net = Net()
    x, y = make_data()
    fit(State(net, torch.optim.SGD(net.parameters(), lr=args.lr)), list(zip(x.split(8), y.split(8))))
""",
    "autocast-bfloat16": """
x, y = make_data()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, targets in zip(x.split(8), y.split(8)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
""",
    "epochs-with-validation": """
from torch.utils.data import DataLoader, TensorDataset, random_split


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = sum(model(inputs).sum().item() for inputs, _ in loader)
    model.train()
    return total


def train_one_epoch(model, loader, optimizer, scheduler):
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = TensorDataset(*make_data())
train_loader = DataLoader(data, batch_size=8, shuffle=True)
valid_loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.zeros(8)), batch_size=4)
for epoch in range(2):
    validate(model, valid_loader)
    train_one_epoch(model, train_loader, optimizer, scheduler)
""",
}
