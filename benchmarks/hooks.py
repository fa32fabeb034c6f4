"""What each hook of a fast step costs by itself, on a machine whose clock says little because others work on it too.

The steps are real ones of the smallest model. Each hook is called once more beside its step, around a stub in the place
of torch's function. By default the time of that call is told, with the caches as cold as in a real step. With
`--instructions` they are counted instead, under callgrind, with everything warm.

    python benchmarks/hooks.py [--steps 2000] [--instructions]
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import instructions
import torch
from loops import Loop, mlp
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.hooks.data import NoticedBatch

WARM_UP = 1200  # steps, after which short steps are known to be short
NEVER = 1 << 60
FEW, MANY = 10, 40  # calls of a hook that is counted
Call = Callable[[], object]


def stub(*args: Any, **kwargs: Any) -> None:
    """Stands for a function of torch."""


class Source:
    """Stands for the iterator of a loader."""

    _num_yielded = 1

    def __init__(self, batch: list[torch.Tensor]) -> None:
        self._batch, self._index = batch, list(range(len(batch[0])))
        self._sampler_iter = iter(())

    def __next__(self) -> Any:
        self._next_index()
        return self._batch

    def _next_index(self) -> Any:
        return self._index


def watched_source(batch: list[torch.Tensor], step: Any) -> Source:
    ours = vars(dataloader._BaseDataLoaderIter)["__next__"]
    noticed = NoticedBatch(vars(Source)["__next__"], ours._before, ours._after, step)
    return type("WatchedSource", (Source,), {"__next__": noticed})(batch)


class Hooks:
    """A loop whose every step is fast, without hooks of its own, and the hooks beside it."""

    def __init__(self, folder: str, warm_up: int) -> None:
        telling.install(folder)
        agent = lifecycle.current()
        assert agent is not None
        self._agent = agent
        self.loop = loop = Loop(mlp, "cpu", time.perf_counter)
        loop.block(warm_up)
        batch = [loop.batch]
        self._source, plain = watched_source(batch, agent.step), Source(batch)
        self.loss = loop.model(loop.batch).square().mean()
        around = agent.hooks._backward._around(stub)
        zero_grad = agent.hooks._optimizers._around_zero_grad(stub)
        begin = next(iter(torch_optimizer._global_optimizer_pre_hooks.values()))
        end = next(iter(torch_optimizer._global_optimizer_post_hooks.values()))
        one = (loop.optimizer,)
        more = {"allow_unreachable": True, "accumulate_grad": True}
        # Each with what the stub takes by itself.
        self.calls: dict[str, tuple[Call, Call]] = {
            "DataLoader": (lambda: next(self._source), lambda: next(plain)),
            "zero_grad": (lambda: zero_grad(*one), lambda: stub(*one)),
            "backward": (
                lambda: around((self.loss,), (None,), False, False, (), **more),
                lambda: stub((self.loss,), (None,), False, False, (), **more),
            ),
            "begin of an update": (lambda: begin(*one, one, {}), lambda: stub(*one, one, {})),
            "end of an update": (lambda: end(*one, one, {}), lambda: stub(*one, one, {})),
        }
        agent.hooks.remove()

    def begin(self) -> None:
        """Begin a stretch of fast steps that has no end."""
        agent, step = self._agent, self._agent.step
        step.fast.leave()
        step.is_sampled_out, step.fast._not_before = True, 0
        step.short_steps.next_full = step.habits.standstill.due = agent.leaks.due = NEVER
        agent.batches.is_asked = False
        agent.batches.index_drawn(self._source, [0])
        agent.hooks._data._record(self._source, vars(Source)["_next_index"])
        next(self._source)  # the first batch of a pass is noted in full
        step.fast.begin(self.loop.optimizer)
        assert step.fast.on, "the steps are not fast"

    @property
    def are_fast(self) -> bool:
        return self._agent.step.fast.on


def cold(hooks: Hooks, steps: int) -> dict[str, float]:
    """Microseconds of each hook, directly after the work of the model; the stub's own are taken off."""
    now, loop = time.perf_counter_ns, hooks.loop
    taken: dict[str, list[int]] = {name: [] for name in hooks.calls}
    own: dict[str, list[int]] = {name: [] for name in hooks.calls}
    for number in range(steps * len(hooks.calls)):
        name = list(hooks.calls)[number % len(hooks.calls)]
        loop.optimizer.zero_grad()
        hooks.loss = loop.model(loop.batch).square().mean()
        hooks.loss.backward()
        loop.optimizer.step()
        loop.model(loop.batch)
        for call, found in zip(hooks.calls[name], (taken, own), strict=True):
            began = now()
            call()
            found[name].append(now() - began)
        if not hooks.are_fast:
            hooks.begin()
    return {name: (low(taken[name]) - low(own[name])) / 1e3 for name in hooks.calls}


def low(values: list[int]) -> int:
    return sorted(values)[len(values) * 3 // 10]


def counted(hooks: Hooks, count: instructions.Counter) -> dict[str, float]:
    """Instructions of each hook, of which the first calls are not counted."""

    def each(call: Call) -> float:
        def work(times: int) -> Call:
            return lambda: [call() for _ in range(times)]

        work(200)()
        found = {times: min(count.of(work(times)) for _ in range(3)) for times in (FEW, MANY)}
        return (found[MANY] - found[FEW]) / (MANY - FEW)

    gc.disable()
    result = {name: each(hook) - each(own) for name, (hook, own) in hooks.calls.items()}
    assert hooks.are_fast
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of the loop, for each hook")
    parser.add_argument("--instructions", action="store_true")
    args = parser.parse_args()
    under = os.environ.get(instructions.UNDER)
    if args.instructions and not under:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "counts"
            command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={output}", "-q"]
            environment = {**os.environ, instructions.UNDER: str(output), "OMP_NUM_THREADS": "1"}
            return subprocess.run([*command, sys.executable, *sys.argv], env=environment, check=False).returncode
    torch.set_num_threads(1)
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # `malloc` takes more with two threads
    with tempfile.TemporaryDirectory() as folder:
        # Under callgrind a step is slow; one is enough, as `begin` says that steps are fast.
        hooks = Hooks(folder, 30 if under else WARM_UP)
        hooks.begin()
        found = counted(hooks, instructions.Callgrind(Path(under))) if under else cold(hooks, args.steps)
        unit = "instructions" if under else "us, cold"
        print(f"| hook of a fast step | {unit} |\n|---|---|")
        for name, value in [*found.items(), ("all without a loader", sum(list(found.values())[1:]))]:
            print(f"| {name} | {value:,.0f} |" if under else f"| {name} | {value:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
