"""Losses, gradients and weights are bit for bit those of the same script without torchmedic; so is what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import plainly
from running import run_plain, run_script

pytestmark = pytest.mark.timeout(300)  # several processes that import torch

TRAINING = '''
import hashlib, io, random
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset


def show(style, losses, *modules):
    """Every bit of it."""
    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in module.named_parameters():
            for part in (tensor, tensor.grad):
                if part is not None:
                    digest.update(part.detach().float().numpy().tobytes())
        for tensor in module.buffers():
            digest.update(tensor.float().numpy().tobytes())
    print(style, [float(loss).hex() for loss in losses], digest.hexdigest())
    print(style, torch.rand(1).item().hex(), random.random(), torch.initial_seed())


def plain_loop():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(12):
        x = torch.randn(32, 8)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    show("plain", losses, model)


class Noisy(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(1, 8, 8) + index / 48, index % 3


def workers_and_dropout():
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    losses = []
    for epoch in range(2):
        model.train()
        for x, y in DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2):
            optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses += [model(x).sum().item() for x, _ in DataLoader(Noisy(), batch_size=16)]
    show("workers", losses, model)


def gan():
    maker = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    losses = []
    for step in range(8):
        for _ in range(2):
            real, fake = torch.randn(16, 8), maker(torch.randn(16, 4)).detach()
            blend = (real + torch.rand(16, 1) * (fake - real)).requires_grad_()
            slope, = torch.autograd.grad(judge(blend).sum(), blend, create_graph=True)
            loss = judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            judges.zero_grad()
            loss.backward()
            judges.step()
            losses.append(loss.item())
        makes.zero_grad()
        loss = -judge(maker(torch.randn(16, 4))).mean()
        loss.backward()
        makes.step()
        losses.append(loss.item())
    show("gan", losses, maker, judge)


def mixed_precision():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    losses = []
    for step in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.randn(4, 6, 16)
            loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().square().mean() / 4
        scaler.scale(loss).backward()
        if step % 4 == 3:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.item())
    show("amp", [*losses, scaler.get_scale()], model)


def recurrent_closure():
    model, head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    x, losses, state = torch.randn(4, 10, 3), [], None
    for step in range(3):

        def closure():
            optimizer.zero_grad()
            out, _ = model(x, state)
            loss = F.mse_loss(head(out), x.cumsum(1)[..., :1])
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        state = tuple(part.detach() for part in model(x, state)[1])
    show("lbfgs", losses, model, head)


torch.manual_seed(3)
random.seed(3)
for style in (plain_loop, workers_and_dropout, gan, mixed_precision, recurrent_closure):
    style()
'''


def test_five_ways_to_train(tmp_path: Path) -> None:
    other = run_script(tmp_path, "import torch.utils.checkpoint\n" + TRAINING)
    plain = plainly(tmp_path, "train.py")  # never imports torchmedic

    assert plain.status == 0, plain.stderr
    assert len(plain.stdout.splitlines()) == 10
    assert (other.stdout, other.stderr) == (plain.stdout, plain.stderr)
    assert other.report.diagnoses == ()
    # 12 plain, 2 x 6 with workers, 8 of the GAN (the judge steps twice in each), 3 of AMP, 3 of LBFGS.
    assert other.report.outcome.steps >= 12 + 12 + 8 + 3 + 3


# The second optimizer is made after the copy of the weights that the last steps are run again from.
SPOILED = """
import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(4, 2), nn.Linear(2, 3)
first = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for step in range(3):
    first.zero_grad()
    encoder(torch.randn(6, 4)).square().mean().backward()
    first.step()
second = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
for step in range(4):
    x = torch.randn(6, 4)
    with torch.no_grad():
        z = encoder(x) - (encoder.bias if step == 2 else 0)
        z[4] *= step != 2
    loss = nn.functional.cross_entropy(head(z / z.abs().amax(1, keepdim=True)), torch.randint(0, 3, (6,)))
    second.zero_grad()
    loss.backward()
    print(step, loss.item(), head.weight.tolist(), head.weight.grad.tolist(), second.state_dict())
    second.step()
"""


def test_a_step_that_was_examined_is_left_as_it_was(tmp_path: Path) -> None:
    plain, other = run_plain(tmp_path, SPOILED), run_script(tmp_path, SPOILED)

    assert plain.returncode == 0, plain.stderr
    assert "nan" in plain.stdout
    assert other.stdout == plain.stdout
    assert other.only.code == "TM201"


TWO_THREADS = """
import threading

import torch
from torch import nn

begun, failed, steps = threading.Event(), threading.Event(), []


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05), torch.Generator().manual_seed(1)


def train(model, optimizer, generator, bad=None):
    x = torch.randn(16, 6, generator=generator)
    loss = nn.functional.cross_entropy(model(x if bad is None else x / bad), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def healthy(parts):
    after = 0
    while after < 200:
        train(*parts)
        steps.append(1)
        begun.set()
        after += failed.is_set()


def broken(parts):
    begun.wait()
    for number in range(8):
        train(*parts, bad=0.0 if number == 6 else 1.0)
        if number == 6:
            failed.set()


first, second = make(), make()
threads = [threading.Thread(target=healthy, args=(first,)), threading.Thread(target=broken, args=(second,))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
alone = make()
for _ in steps:
    train(*alone)
print(all(map(torch.equal, first[0].state_dict().values(), alone[0].state_dict().values())))
"""


def test_threads_that_train_at_the_same_time_are_left_alone(tmp_path: Path) -> None:
    finished = run_script(tmp_path, TWO_THREADS)

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "True\n"
    assert finished.stderr == ""
