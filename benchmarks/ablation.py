"""What each hook costs, in one process: every few steps, another one of the hooks is left out at random.

Nothing is installed or removed meanwhile, as that would cost more than a hook: a switch stands at the place of each
hook, and passes on to the hook or to torch's own function. So all variants share the state of the process and the mood
of the machine, and differ by microseconds that a median over thousands of steps can tell. The second table splits the
steps by what the hooks did in them: `fast` (a stretch of steps that are only counted), `sampled out` (a little more
than that, at the end of a stretch), `full` (noted in full).

    python benchmarks/ablation.py [--device cuda] [--seconds 35] [--clock cpu] [--threads 1] [--parts backward]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from loops import Loop, mlp
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import dataloader

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent
from torchmedic.observe.hooks import patches

FIRST_STEPS = 600  # after which short steps are known to be short, and the check-up is over
RUN_STEPS = (3, 4, 5)  # of one variant in a row, at random; the first of them is not counted
_OPTIMIZER = torch.optim.Optimizer
_ITERATOR = dataloader._BaseDataLoaderIter
# The places of the patches that a step passes.
PLACES: dict[str, tuple[tuple[Any, str], ...]] = {
    "backward": ((torch.autograd, "_engine_run_backward"),),
    "zero_grad": ((_OPTIMIZER, "zero_grad"),),
    "batch": ((_ITERATOR, "__next__"), (_ITERATOR, "_next_index")),
}


class Switches:
    """Stand at the places of hooks, and leave some of them out."""

    def __init__(self, agent: Agent) -> None:
        self.off: frozenset[str] = frozenset()
        originals = {(owner, name): original for owner, name, original in reversed(patches._made)}
        for part, places in PLACES.items():
            for owner, name in places:
                make = self._method if part == "batch" else self._function
                patch = vars(owner)[name]
                setattr(owner, name, make(part, patch, originals[owner, name]))
        for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = self._function("step", hook, lambda *args: None)
        late = agent.finite.losses.late
        vars(late)["hold"] = self._function("hold", late.hold, lambda *args: None)

    def _function(self, part: str, patch: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def switch(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if part in self.off else patch(*args, **kwargs)

        return switch

    def _method(self, part: str, patch: Any, original: Any) -> Any:
        switches = self

        class Switch:
            def __get__(self, owner: Any, kind: Any = None) -> Any:
                return (original if part in switches.off else patch).__get__(owner, kind)

        return Switch()


def measure(loop: Loop, agent: Agent, switches: Switches, parts: Sequence[str], seconds: float) -> str:
    switches.off = frozenset()
    loop.block(FIRST_STEPS)
    names = ["backward", "hold", "zero_grad", "step", *(["batch"] if "DataLoader" in loop.name else [])]
    variants = {"plain": frozenset(names), "torchmedic": frozenset[str]()}
    variants |= {f"without {name}": frozenset({name}) for name in names if name in parts}
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    generator = random.Random(0)
    step, clock = agent.step, loop.clock
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        name = generator.choice([*variants, "plain", "torchmedic"])
        switches.off = variants[name]
        agent.clock._step_closed = None  # steps without hooks are not seen to end
        for number in range(generator.choice(RUN_STEPS)):
            was_fast, was_out = step.fast.on, step.is_sampled_out
            began = clock()
            loop.step()
            took = clock() - began
            kind = "fast" if was_fast and step.fast.on else "sampled out" if was_out else "full"
            if number:
                taken[name].setdefault(kind, []).append(took)
    switches.off = frozenset()
    return table(loop, taken)


def table(loop: Loop, taken: dict[str, dict[str, list[float]]]) -> str:
    every = {name: [value for values in kinds.values() for value in values] for name, kinds in taken.items()}
    plain = low(every["plain"])
    lines = [f"{loop.name}, {loop.device}: plain {plain * 1e6:.1f} us", ""]
    lines += [
        "| variant | steps | lower quartile, median of fast steps, us | above plain, us | |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in taken.items():
        values = kinds.get("fast", []) if name != "plain" else every["plain"]
        if len(values) > 8:
            above = (low(values) - plain) * 1e6, (statistics.median(values) - statistics.median(every["plain"])) * 1e6
            lines.append(
                f"| {name} | {len(values)} | {low(values) * 1e6:.1f}, {statistics.median(values) * 1e6:.1f} "
                f"| {above[0]:+.1f}, {above[1]:+.1f} | {low(values) / plain:.4f}x |"
            )
    count = sum(map(len, taken["torchmedic"].values()))
    middle = statistics.median(every["plain"])
    lines += ["", "| kind of step under torchmedic | steps | median, us | above plain, us | of all time |"]
    lines += ["|---|---|---|---|---|"]
    for kind, values in taken["torchmedic"].items():
        above_it = statistics.median(values) - middle
        share = above_it * len(values) / (count * middle)
        lines.append(
            f"| {kind} | {len(values)} | {statistics.median(values) * 1e6:.1f} | {above_it * 1e6:+.1f} | {share:.3%} |"
        )
    return "\n".join([*lines, ""])


def low(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=35.0, help="for each loop")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: of the thread that trains")
    parser.add_argument("--parts", nargs="*", default=["backward", "hold", "zero_grad", "step", "batch"])
    args = parser.parse_args()
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        telling.install(folder)
        agent = lifecycle.current()
        assert agent is not None
        switches = Switches(agent)
        for loads in (False, True):
            loop = Loop(mlp, args.device, clock, loads=loads)
            print(measure(loop, agent, switches, args.parts, args.seconds), flush=True)
            del loop
            gc.collect()  # with two optimizers alive, a step is over when both have stepped


if __name__ == "__main__":
    main()
