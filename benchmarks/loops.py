"""The training loops whose steps the benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpt import VOCABULARY, GPTLoss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 64  # of a pass of the loader

Build = Callable[[str], tuple[nn.Module, torch.Tensor]]


def mlp(device: str) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(256, 256) if index % 2 == 0 else nn.ReLU() for index in range(7)]
    return nn.Sequential(*layers), torch.randn(64, 256)


def cnn(device: str) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    return model, torch.randn(32 if device == "cpu" else 256, 3, 32, 32)


def transformer(device: str) -> tuple[nn.Module, torch.Tensor]:
    width, batch, length = (256, 8, 64) if device == "cpu" else (1024, 16, 512)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(batch, length, width)


def gpt(size: str) -> Build:
    def build(device: str) -> tuple[nn.Module, torch.Tensor]:
        length = 1024
        return GPTLoss(size, length, device), torch.randint(0, VOCABULARY, (8, length + 1))

    build.__name__ = size
    return build


MODELS: dict[str, tuple[Build, ...]] = {
    "cpu": (cnn, transformer),
    "cuda": (gpt("gpt2-124m"), gpt("gpt2-350m")),
}


class Loop:
    """An ordinary training loop."""

    def __init__(self, build: Build, device: str, clock: Callable[[], float], *, loads: bool = False) -> None:
        torch.manual_seed(0)
        self.name = build.__name__ + (", DataLoader" if loads else "")
        self.clock = clock
        model, batch = build(device)
        self.model, self.batch, self.device = model.to(device), batch.to(device), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._loader = DataLoader(TensorDataset(batch.repeat(BATCHES, 1)), batch_size=len(batch)) if loads else None
        self._batches: Iterator[Any] = iter(())

    def _next_batch(self) -> torch.Tensor:
        if self._loader is None:
            return self.batch
        try:
            batch: torch.Tensor = next(self._batches)[0]
        except StopIteration:
            self._batches = iter(self._loader)
            batch = next(self._batches)[0]
        return batch.to(self.device)

    def block(self, steps: int) -> float:
        """Seconds per step."""
        self._wait()
        started = self.clock()
        for _ in range(steps):
            self.step()
        self._wait()
        return (self.clock() - started) / steps

    def step(self) -> None:
        batch = self._next_batch()
        self.optimizer.zero_grad()
        output = self.model(batch)
        loss = output if output.dim() == 0 else output.square().mean()
        loss.backward()
        self.optimizer.step()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
