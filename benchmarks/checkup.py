"""The cost of the check-up: the first step with it, in plain steps, and the ratio of a later step with and without it.

Everything is measured in one process on warm steps, so that torch's own start-up is excluded.

    python benchmarks/checkup.py [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from overhead import MODELS
from torch import nn

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent
from torchmedic.observe.checkup.watch import Checkup

BAR = 15.0
ROUNDS = 5
STEPS = 8


def step_of(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        out = model(batch)
        loss = out if out.numel() == 1 else nn.functional.mse_loss(out, torch.zeros_like(out))
        loss.backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(agent: Agent, step: Callable[[], None], device: str) -> tuple[float, float, float]:
    """Seconds of a plain step, of a step with the check-up, and of a step after it."""
    plain, first, later = [], [], []
    for _ in range(ROUNDS):
        agent.checkup = agent.step.checkup = Checkup(agent)
        plain += [timed(step, device) for _ in range(STEPS)]
        agent.checkup.start()
        first.append(timed(step, device))
        later += [timed(step, device) for _ in range(STEPS)]
    return statistics.median(plain), statistics.median(first), statistics.median(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    telling.install(tempfile.mkdtemp())
    agent = lifecycle.current()
    assert agent is not None
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads; bar: {BAR:.0f} plain steps")
    for build in MODELS[device]:
        model, batch = build(device)
        step = step_of(model.to(device), batch.to(device))
        for _ in range(10):
            step()
        plain, first, later = measure(agent, step, device)
        verdict = "ok" if first <= BAR * plain else "ABOVE THE BAR"
        print(
            f"{build.__name__:>12}: plain step {plain * 1e3:8.3f} ms, under the check-up {first * 1e3:8.3f} ms "
            f"= {first / plain:5.2f} plain steps ({verdict}); after it {later / plain:5.3f}x"
        )


if __name__ == "__main__":
    main()
