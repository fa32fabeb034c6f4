"""The peak that is predicted on fake tensors is that of a real card, and what is said to cure an out-of-memory does.

python -m pytest -m gpu tests/gpu/test_peak_cuda.py -s
"""

from __future__ import annotations

import gc
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from predicted_peak import peak_of
from running import torchmedic
from torch import nn

from torchmedic.replay.fake.recurrent import kept_bytes

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 2**20


class Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(given, width, 1, bias=False), nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.c = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.na, self.nb, self.nc = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)
        self.skip = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))))
        return F.relu(self.nc(self.c(h)) + self.skip(x))


def resnet() -> nn.Module:
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    given = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(given, width, stride if number == 0 else 1))
            given = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Level(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(given, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.na, self.nb = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.nb(self.b(F.silu(self.na(self.a(x))))))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (128, 256, 512)
        self.down = nn.ModuleList(Level(a, b) for a, b in zip((4, *widths[:-1]), widths, strict=True))
        self.up = nn.ModuleList(Level(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.out = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2)
        for level, skip in zip(self.up, kept[-2::-1], strict=True):
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.out(x)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20000, 1024), nn.Linear(1024, 20000)
        self.rnn = nn.LSTM(1024, 1024, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.words(x))[0]).flatten(0, 1)


def gpt(size: str = "gpt2-124m") -> nn.Module:
    spec = importlib.util.spec_from_file_location("gpt", BENCHMARKS / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: nn.Module = module.GPTLoss(size, 1024, "cuda")
    return made


def tokens(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape, device="cuda")


Draw = Callable[[], tuple[torch.Tensor, torch.Tensor]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Draw, Loss]] = {
    "gpt2-124m": (gpt, lambda: (tokens(50304, 8, 1025), tokens(2, 1)), lambda out, _: out),
    "resnet-50": (
        resnet,
        lambda: (torch.randn(64, 3, 224, 224, device="cuda"), tokens(1000, 64)),
        F.cross_entropy,
    ),
    "u-net": (
        UNet,
        lambda: (torch.randn(16, 4, 64, 64, device="cuda"), torch.randn(16, 4, 64, 64, device="cuda")),
        F.mse_loss,
    ),
    "lstm": (Tagger, lambda: (tokens(20000, 32, 256), tokens(20000, 32 * 256)), F.cross_entropy),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_that_of_the_card(name: str) -> None:
    build, draw, loss_of = MODELS[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = draw()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    rows: list[tuple[int, int]] = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
        predicted = before - held + with_gradients(step, model, optimizer)
        assert torch.cuda.max_memory_allocated() == before  # the prediction takes nothing
        step()
        rows.append((predicted, torch.cuda.max_memory_allocated()))
    for number, (predicted, real) in enumerate(rows):
        error = 100 * (predicted / real - 1)
        sizes = f"predicted {predicted / MIB:9.1f} MiB  real {real / MIB:9.1f} MiB"
        print(f"\n{name:10} step {number}: {sizes}  {error:+6.2f} %", end="")
    assert all(predicted == pytest.approx(real, rel=0.05) for predicted, real in rows)


def with_gradients(step: Callable[[], None], model: nn.Module, optimizer: Any) -> int:
    """The peak of a step, gradients of the step before included until it lets go of them."""

    def whole() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = torch.empty_like(parameter)
        step()

    return max(peak_of(whole, modules=[model], optimizers=[optimizer]).values())


def test_what_cudnn_keeps_for_backward() -> None:
    """The size of its reserve, which nobody documents: what is modelled beside what it is."""
    shares = []
    for kind, mode in ((nn.LSTM, 2), (nn.GRU, 3), (nn.RNN, 1)):
        for time, rows, given, hidden, layers, both in ((256, 32, 512, 1024, 1, False), (100, 16, 64, 256, 3, True)):
            rnn = kind(given, hidden, layers, bidirectional=both).cuda()
            x = torch.randn(time, rows, given, device="cuda")
            node = rnn(x)[0].grad_fn
            while "Cudnn" not in node.name():
                node = node.next_functions[0][0]
            real = node._saved_result3.nbytes
            modelled = kept_bytes(x, mode, hidden, layers, both)
            shares.append((kind.__name__, modelled / max(1, real)))
            per = real / (time * rows * hidden * (2 if both else 1) * 4)
            what = f"{kind.__name__:5} {layers} layers, both ways {both}"
            print(f"\n{what}: real {real}, modelled {modelled}, {per:.3f} per unit", end="")
    assert all(share == pytest.approx(1, rel=0.1) for name, share in shares if name == "LSTM")


SCRIPT = f"""
import contextlib
import functools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, {str(BENCHMARKS)!r})
from gpt import Block

ROWS, CAP, HOW = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 512), nn.Linear(512, 1000)
        self.blocks = nn.ModuleList(Block(512, 8) for _ in range(12))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
if HOW == "checkpoint":
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
lower = torch.autocast("cuda", dtype=torch.bfloat16) if HOW == "autocast" else contextlib.nullcontext()
if CAP:
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
for step in range(4):
    tokens = torch.randint(0, 1000, (ROWS, 513), device="cuda")
    with lower:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    if HOW != "batch" or step % 2:
        optimizer.step()
        optimizer.zero_grad()
print(torch.cuda.max_memory_reserved())
"""


def test_what_is_predicted_to_fit_does(tmp_path: Path) -> None:
    def run(*arguments: object) -> Any:
        folder = tmp_path / "-".join(map(str, arguments))
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)
        return torchmedic(folder, "train.py", *map(str, arguments))

    needed = int(run(32, 0, "plain").stdout)
    finished = run(32, int(0.7 * needed), "plain")
    print(finished.stderr[finished.stderr.find("error[") :])
    cures = [each for each in finished.only.treatments if each.result]
    assert finished.only.code == "TM402", finished.stderr
    assert cures, finished.stderr
    for cure in cures:
        rows = re.search(r"batch of (\d+)", cure.title)
        how = "batch" if rows else "checkpoint" if "checkpoint" in cure.title else "autocast"
        again = run(int(rows[1]) if rows else 32, int(0.7 * needed), how)
        print(json.dumps([cure.title, cure.result, again.returncode, again.stdout.strip()]), file=sys.stderr)
        assert again.returncode == 0, again.stderr
