"""Steps under a cap of device memory, with recovery and with what people use instead.

The need is the peak of a step without a cap. Then the process may have 0.8, 0.7, 0.6 and 0.5 of it. For each cap and
each way, the table has the time per step as a ratio to the step without a cap, and the largest relative difference of
the losses of 20 steps; `oom` where the way does not fit.

    python benchmarks/recover.py --output recover-h200               # needs CUDA

Ways: `recover` (`torchmedic.recover()`), `save_on_cpu` (all saved tensors in pinned host memory), `checkpoint` (every
block recomputed). Bars: 1.15x at 0.8, 1.5x at 0.6, losses within 1e-5, and ahead of the others at equal memory.
Not measured yet.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpt
import torch
from measured_run import environment, save
from torch.utils.checkpoint import checkpoint

import torchmedic

STEPS = 20
CAPS = (0.8, 0.7, 0.6, 0.5)
MODELS = ("gpt2-124m", "gpt2-350m", "resnet50")
_LENGTH = 1024
_BATCHES = {"gpt2-124m": 8, "gpt2-350m": 4, "resnet50": 64}


def training(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A model, its optimizer, and a function that computes the loss of the next batch."""
    torch.manual_seed(0)
    size = _BATCHES[name]
    if name == "resnet50":
        from torchvision.models import resnet50

        model: torch.nn.Module = resnet50().cuda()
        generator = torch.Generator("cuda").manual_seed(1)

        def loss() -> torch.Tensor:
            x = torch.randn(size, 3, 224, 224, device="cuda", generator=generator)
            y = torch.randint(0, 1000, (size,), device="cuda", generator=generator)
            return torch.nn.functional.cross_entropy(model(x), y)
    else:
        model = gpt.GPT(name, _LENGTH).cuda()
        generator = torch.Generator("cuda").manual_seed(1)

        def loss() -> torch.Tensor:
            tokens = torch.randint(0, gpt.VOCABULARY, (size, _LENGTH + 1), device="cuda", generator=generator)
            logits = model(tokens[:, :-1])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    if isinstance(model, gpt.GPT):
        return list(model.blocks)
    return [block for name, layer in model.named_children() if name.startswith("layer") for block in layer.children()]


@contextlib.contextmanager
def in_way(way: str, model: torch.nn.Module) -> Iterator[None]:
    if way == "recover":
        with torchmedic.recover():
            yield
    elif way == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            yield
    else:
        for block in blocks_of(model) if way == "checkpoint" else ():
            forward = block.forward
            block.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)
        yield


def measure(name: str, way: str, limit: float | None) -> dict[str, Any]:
    """The losses and the seconds per step of one training; `oom` if it does not fit."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total))
    model, optimizer, loss_of = training(name)
    torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    try:
        with in_way(way, model):
            for _ in range(STEPS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return {"oom": True}
    finally:
        del model, optimizer, loss_of
        loss = None
        gc.collect()
        torch.cuda.empty_cache()
    rest = sorted(times[STEPS // 2 :])
    return {
        "losses": losses,
        "seconds": rest[len(rest) // 2],
        "first_steps_seconds": sum(times[: STEPS // 2]),
        "peak": torch.cuda.max_memory_reserved(),
    }


def compared(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    if "oom" in found:
        return found
    worst = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], plain["losses"], strict=True))
    return {**found, "ratio": found["seconds"] / plain["seconds"], "worst_loss_difference": worst}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="recover")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("recover.py needs CUDA", file=sys.stderr)
        return 1
    torch.use_deterministic_algorithms(True, warn_only=True)
    results: dict[str, Any] = {}
    for name in args.models:
        plain = measure(name, "plain", None)
        rows = results[name] = {"plain": plain}
        for cap in CAPS:
            for way in ("recover", "save_on_cpu", "checkpoint"):
                found = rows[f"{way} at {cap}"] = compared(measure(name, way, cap * plain["peak"]), plain)
                shown = "oom" if "oom" in found else f"{found['ratio']:.2f}x, {found['worst_loss_difference']:.1e}"
                print(f"{name:10} {cap} {way:12} {shown}", flush=True)
    save(args.output, {"environment": environment("cuda"), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
