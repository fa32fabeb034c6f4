"""Steps under a cap of device memory, with recovery and with what people use instead.

The need is the peak of a step without a cap. Then the process may have 0.8, 0.7, 0.6 and 0.5 of it. For each cap and
each way, the table has the time per sample as a ratio to the training without a cap, and the largest relative
difference of the losses; `oom` where the way does not fit.

    python benchmarks/recover.py --output recover-h200               # needs CUDA

Ways: `recover` (`torchmedic.recover()`), `save_on_cpu` (all saved tensors in pinned host memory), `checkpoint` (every
block recomputed), `batch` (the batch is made smaller until it fits, by accelerate's `find_executable_batch_size`, which
is another training). `save_on_cpu` and `checkpoint` do the same at every cap, so each runs once, and fits where its
peak does.
Bars: 1.15x at 0.8, 1.5x at 0.6, losses within 1e-5, and ahead of the others at equal memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpt
import resnet
import torch
from measured_run import environment, save
from torch.utils.checkpoint import checkpoint

import torchmedic

CAPS = (0.8, 0.7, 0.6, 0.5)
MODELS = ("gpt2-124m", "gpt2-350m", "resnet50")
WAYS = ("recover", "save_on_cpu", "checkpoint", "batch")
_LENGTH = 1024
_BATCHES = {"gpt2-124m": 8, "gpt2-350m": 4, "resnet50": 64}


def training(name: str, size: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A model, its optimizer, and a function that computes the loss of the next batch."""
    torch.manual_seed(0)
    if name == "resnet50":
        model: torch.nn.Module = resnet.resnet50().cuda()
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
    return [each for each in model.modules() if isinstance(each, resnet.Bottleneck)]


@contextlib.contextmanager
def in_way(way: str, model: torch.nn.Module) -> Iterator[list[Any]]:
    if way == "recover":
        with torchmedic.recover() as happened:
            yield happened
    elif way == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            yield []
    else:
        for block in blocks_of(model) if way == "checkpoint" else ():
            forward = block.forward
            block.forward = lambda *args, _forward=forward: checkpoint(_forward, *args, use_reentrant=False)
        yield []


def measure(name: str, way: str, limit: float | None, steps: int, size: int | None = None) -> dict[str, Any]:
    """The losses and the seconds per step of one training; `oom` if it does not fit."""
    size = size or _BATCHES[name]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total))
    torch.cuda.reset_peak_memory_stats()
    losses, times, events = [], [], []
    try:
        model, optimizer, loss_of = training(name, size)
        with in_way(way, model) as happened:
            events = happened
            for _ in range(steps):
                torch.cuda.synchronize()
                started = time.perf_counter()
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return {"oom": True, "after": len(losses), "events": [repr(each) for each in events]}
    finally:
        model = optimizer = loss_of = loss = None
        gc.collect()
        torch.cuda.empty_cache()
    rest = sorted(times[steps // 2 :])
    return {
        "losses": losses,
        "seconds": rest[len(rest) // 2] / size,
        "first_steps_seconds": sum(times[: steps // 2]),
        "peak": torch.cuda.max_memory_reserved(),
        "batch": size,
        "events": [repr(each) for each in events],
    }


def smaller_batch(name: str, limit: float, steps: int) -> dict[str, Any]:
    """The training with the largest batch that fits, found as accelerate finds it."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=_BATCHES[name])
    def train(size: int) -> dict[str, Any]:
        found = measure(name, "plain", limit, steps, size)
        if "oom" in found:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    try:
        return train()
    except RuntimeError:
        return {"oom": True}


def compared(found: dict[str, Any], plain: dict[str, Any], limit: float) -> dict[str, Any]:
    if "oom" in found or found["peak"] > limit:
        return {**found, "oom": True}
    differences = [abs(a - b) / abs(b) for a, b in zip(found["losses"], plain["losses"], strict=True)]
    first = next(((step, each) for step, each in enumerate(differences) if each), None)
    ratio = found["seconds"] / plain["seconds"]
    return {**found, "ratio": ratio, "worst_loss_difference": max(differences), "first_difference": first}


def shown(found: dict[str, Any]) -> str:
    if "oom" in found:
        return f"oom  {' | '.join(found.get('events', [])[-2:])}"
    batch, begin = found["batch"], found["first_steps_seconds"]
    differs = f", first at step {found['first_difference']}" if found["worst_loss_difference"] else ""
    worst = f"{found['worst_loss_difference']:.1e}{differs}"
    return f"{found['ratio']:.2f}x, losses within {worst}, batch {batch}, first half {begin:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="recover")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--caps", nargs="+", type=float, default=CAPS, help="shares of the need")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("recover.py needs CUDA", file=sys.stderr)
        return 1
    torch.use_deterministic_algorithms(True, warn_only=True)
    results: dict[str, Any] = {}
    for name in args.models:
        measure(name, "plain", None, 3)
        plain = measure(name, "plain", None, args.steps)
        print(f"{name:10} need {plain['peak'] / 2**30:.2f} GiB, {plain['seconds'] * plain['batch']:.4f} s", flush=True)
        rows = results[name] = {"plain": plain}
        once = {way: measure(name, way, None, args.steps) for way in ("save_on_cpu", "checkpoint") if way in args.ways}
        # A batch that does not fit leaves other kernels of convolutions behind for the whole process, so it is last.
        for cap, way in sorted(itertools.product(args.caps, args.ways), key=lambda each: each[1] == "batch"):
            limit = cap * plain["peak"]
            if way == "batch":
                found = smaller_batch(name, limit, args.steps)
            else:
                found = once[way] if way in once else measure(name, way, limit, args.steps)
            rows[f"{way} at {cap}"] = found = compared(found, plain, limit)
            print(f"{name:10} {cap} {way:12} {shown(found)}", flush=True)
    save(args.output, {"environment": environment("cuda"), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
