"""The share of the training thread's processor time that each part of torchmedic takes, whatever else the machine does.

The hooks are timed from outside with the clock of the thread, and the parts within them by themselves: the time of a
part does not include that of another one. `checks` are the accounts of the budget (`observe/budget.py`), which count by
the same clock. What torchmedic costs beyond its own time, by caches that it empties, is not seen here.

    python benchmarks/shares.py [--models mlp cnn transformer] [--steps 300] [--loads] [--threads 1]
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from loops import MODELS, Loop, mlp

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent

FIRST_STEPS = 400  # after which short steps are known to be short, and the check-up is over, but
MAX_FIRST_SECONDS = 30.0


class Clock:
    """Adds up the thread's time by part."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - started
                self.spent[part] += taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        return call

    def watch(self, agent: Agent) -> None:
        hooks, finite, step = agent.hooks, agent.finite, agent.step
        parts: dict[str, tuple[tuple[Any, str], ...]] = {
            "backward": ((hooks._backward, "_begins"), (hooks._backward, "_ends")),
            "forward": ((hooks.forward, "_note"),),
            "zero_grad": ((hooks._optimizers, "_gradients_cleared"),),
            "optimizer": ((hooks._optimizers, "_note_begin"), (hooks._optimizers, "note_end")),
            "data": ((hooks._data, "_requested"), (hooks._data, "_arrived"), (hooks._data, "_arrived_sampled_out")),
            "notes of a step": ((agent.notes, "step_begins"), (agent.notes, "forward_begins")),
            "check-up": ((step, "check_up"),),
            "losses": ((finite, "backward_begins"), (finite.losses, "hold")),
            "checks: finite": ((finite._checks, "any_bad_gradient"), (finite._checks, "any_bad_weight")),
            "checks: memory of steps": ((finite.memory, "record"), (finite.memory, "_take")),
            "checks: leaks": ((agent.leaks, "look"),),
            "memory readings, curves": ((agent.clock.gauge, "read"), (step.curves, "note")),
            "standing still": ((agent.habits.standstill, "stepped"),),
        }
        for part, places in parts.items():
            for owner, name in places:
                setattr(owner, name, self.timed(part, getattr(owner, name)))


def measure(agent: Agent, clock: Clock, loop: Loop, steps: int) -> str:
    end = time.monotonic() + MAX_FIRST_SECONDS
    for _ in range(FIRST_STEPS):
        loop.block(1)
        if time.monotonic() > end:
            break
    clock.spent.clear()
    before = {name: account.spent for name, account in agent.budget.accounts().items()}
    elapsed, started = time.monotonic(), time.thread_time()
    loop.block(steps)
    elapsed, taken = time.monotonic() - elapsed, time.thread_time() - started
    lines = [f"{loop.name}: {steps} steps, {taken / steps * 1e3:.2f} ms of the thread each, {elapsed:.1f} s in all", ""]
    lines += ["| part | us a step | share of the thread's time |", "|---|---|---|"]
    for part, spent in clock.spent.most_common():
        lines.append(f"| {part} | {spent / steps * 1e6:.1f} | {spent / taken:.3%} |")
    total = sum(clock.spent.values())
    lines.append(f"| all | {total / steps * 1e6:.1f} | {total / taken:.3%} |")
    charged = {name: account.spent - before[name] for name, account in agent.budget.accounts().items()}
    shown = ", ".join(f"{name} {spent / elapsed:.3%}" for name, spent in charged.items())
    return "\n".join([*lines, "", f"accounts, of the time that passed: {shown}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--loads", action="store_true", help="feed the loops by a DataLoader")
    parser.add_argument("--threads", type=int, default=1, help="of torch: idle ones spin, which counts as their work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        telling.install(folder)
        agent = lifecycle.current()
        assert agent is not None
        agent.hooks.remove()
        clock = Clock()
        clock.watch(agent)
        agent.hooks.install()
        for build in (mlp, *MODELS["cpu"]):
            if build.__name__ in args.models:
                loop = Loop(build, "cpu", time.perf_counter, loads=args.loads)
                print(measure(agent, clock, loop, args.steps), flush=True)
        agent.hooks.remove()


if __name__ == "__main__":
    main()
