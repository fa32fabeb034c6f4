"""The cost of the healthy path in time: a step without torchmedic, with torchmedic, and under other debugging tools.

All are measured in one process, in short alternating blocks, and compared block by block, so that changes in the speed
of the machine cancel. The check-up of the first steps is over by then; what it costs is a column of its own. Start-up
is measured by starting processes, also alternating. The column `processes` is the second way: processes that never
change their hooks, as `turns.py` describes. `--ablate` switches off one part of torchmedic at a time, and prints the
cost of each; `shares.py` adds up the processor's time of each part.

    python benchmarks/overhead.py [--device cuda] [--clock cpu] [--output NAME] [--ablate]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import turns
from loops import MODELS, Loop, mlp
from measured_run import environment, save

from torchmedic.integrations import telling
from torchmedic.observe import lifecycle
from torchmedic.observe.agent import Agent
from torchmedic.observe.step.blackbox import BlackBox

SMALLEST_TARGET, TARGET = 1.02, 1.01
FIRST_STEPS = 64  # in which the loop is checked
MAX_FIRST_SECONDS = 30.0
BLOCK_SECONDS = {"cpu": 0.03, "cuda": 0.25}
SLOW_EVERY = 4  # rounds; one of them includes the slow tools


@contextlib.contextmanager
def watching(agent: Agent) -> Iterator[None]:
    """Run under torchmedic, without effects of its absence in between."""
    agent.hooks.install()
    away = time.monotonic() - _away[-1]
    for account in agent.budget.accounts().values():
        account._at += away  # a share of the watched time is spent
    agent.clock._step_closed = None
    try:
        yield
    finally:
        agent.hooks.remove()
        _away.append(time.monotonic())


_away = [time.monotonic()]


@contextlib.contextmanager
def debug_mode() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode():
        yield


@contextlib.contextmanager
def underflow_overflow(loop: Loop) -> Iterator[None]:
    """Run under Hugging Face's DebugUnderflowOverflow, which is removed after the block."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = [(module, module._forward_hooks.copy()) for module in loop.model.modules()]
    DebugUnderflowOverflow(loop.model, max_frames_to_save=21)
    try:
        yield
    finally:
        for module, hooks in before:
            module._forward_hooks.clear()
            module._forward_hooks.update(hooks)


Modes = dict[str, Callable[[], AbstractContextManager[Any]]]


def tools(loop: Loop, agent: Agent) -> Modes:
    """The modes that are installed."""
    modes: Modes = {
        "plain": contextlib.nullcontext,
        "torchmedic": lambda: watching(agent),
        "anomaly": torch.autograd.detect_anomaly,
    }
    if loop.device == "cuda":
        if importlib.util.find_spec("torch.utils._debug_mode"):
            modes["debug_mode"] = debug_mode
        if importlib.util.find_spec("transformers"):
            modes["underflow_overflow"] = lambda: underflow_overflow(loop)
    return modes


def ratios(loop: Loop, modes: Modes, fast: Sequence[str], seconds: float) -> tuple[float, dict[str, float], int]:
    """Run blocks of all modes in turns; returns the seconds of a plain step, and the median ratio of neighbours.

    Args:
        loop: The loop to measure.
        modes: `plain` and others.
        fast: The modes that are measured in every round; the others are measured in some rounds.
        seconds: Length of the measurement.
    """
    loop.block(20 if loop.device == "cpu" else 5)
    steps = max(2, int(BLOCK_SECONDS[loop.device] / loop.block(10)))
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    plain: list[float] = []
    end = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end and number >= 10:
            break
        # The position in a round matters (warm or cold caches), so the modes take turns at being first.
        order = list(fast) if number % 2 else list(reversed(fast))
        if number % SLOW_EVERY == 0:
            order += [mode for mode in modes if mode not in fast]
        taken = {}
        for mode in order:
            with modes[mode]():
                loop.block(1)  # warm up the new mode
                taken[mode] = loop.block(steps if mode in fast else max(1, steps // 8))
        plain.append(taken["plain"])
        for mode, value in taken.items():
            found[mode].append(value / taken["plain"])
    return statistics.median(plain), {mode: statistics.median(values) for mode, values in found.items()}, len(plain)


def first_steps(loop: Loop, agent: Agent) -> float:
    """The ratio of the first watched steps of a loop to plain ones."""
    plain = loop.block(10)
    agent.habits.awake = agent.habits.listening = True
    agent.habits._woke, agent.habits._last = agent.habits.steps, FIRST_STEPS
    taken = []
    end = time.monotonic() + MAX_FIRST_SECONDS
    with watching(agent):
        while agent.habits.awake and time.monotonic() < end:
            taken.append(loop.block(1))
    return statistics.fmean(taken) / plain


def in_processes(loop: Loop, processes: int, seconds: float) -> dict[str, float]:
    model, _, loads = loop.name.partition(", ")
    clock = next(name for name, clock in turns.CLOCKS.items() if clock is loop.clock)
    taken = turns.measure(model, loop.device, loads=bool(loads), processes=processes, seconds=seconds, clock=clock)
    plain, watched = turns.low(taken["plain"]), turns.low(taken["torchmedic"])
    return {"processes_plain_ms": round(plain * 1e3, 3), "processes_ratio": round(watched / plain, 4)}


def compare(loop: Loop, agent: Agent, seconds: float, target: float, processes: int) -> dict[str, Any]:
    loop.block(20 if loop.device == "cpu" else 5)
    first = first_steps(loop, agent)
    modes = tools(loop, agent)
    failed = []
    for mode in [mode for mode in modes if mode not in ("plain", "torchmedic", "anomaly")]:
        try:
            with modes[mode]():
                loop.block(1)
        except Exception as error:  # another tool may not support this model
            del modes[mode]
            failed.append(f"{mode}: {type(error).__name__}")
    plain, found, rounds = ratios(loop, modes, ("plain", "torchmedic"), seconds)
    return {
        "model": loop.name,
        "plain_ms": round(plain * 1e3, 3),
        "torchmedic_ratio": round(found["torchmedic"], 4),
        "first_steps_ratio": round(first, 3),
        "anomaly_ratio": round(found["anomaly"], 2),
        **{f"{mode}_ratio": round(found[mode], 2) for mode in modes if mode in ("debug_mode", "underflow_overflow")},
        "own_us_per_step": round((found["torchmedic"] - 1) * plain * 1e6, 1),
        **(in_processes(loop, processes, seconds) if processes else {}),
        "rounds": rounds,
        "failed": failed,
        "target": target,
    }


def ablate(loop: Loop, agent: Agent, seconds: float) -> str:
    """The cost of each part on this model: the time with all parts minus the time without that part."""
    parts = without_parts(agent)

    def missing(part: str) -> Callable[[], AbstractContextManager[Any]]:
        @contextlib.contextmanager
        def mode() -> Iterator[None]:
            with watching(agent), parts[part]():
                yield

        return mode

    modes: Modes = {"plain": contextlib.nullcontext, "torchmedic": lambda: watching(agent)}
    modes |= {part: missing(part) for part in parts}
    loop.block(20)
    first_steps(loop, agent)
    with watching(agent):
        loop.block(400)  # until short steps are known to be short
    plain, found, rounds = ratios(loop, modes, list(modes), seconds)
    everything = found["torchmedic"]
    lines = [f"{loop.name}: plain {plain * 1e6:.0f} us a step; with torchmedic {everything:.4f}x, {rounds} rounds", ""]
    lines += ["| part | without it | costs, us a step |", "|---|---|---|"]
    for part in parts:
        lines.append(f"| {part} | {found[part]:.4f}x | {(everything - found[part]) * plain * 1e6:.1f} |")
    return "\n".join(lines)


def without_parts(agent: Agent) -> Modes:
    """Switch off one part, and on again."""
    step, clock, finite = agent.step, agent.clock, agent.finite
    return {
        "numbers (all of it)": lambda: setting(finite, on=False),
        "numbers: losses that are read late": lambda: setting(finite.losses.late, hold=lambda *args: None),
        "numbers: the gradients": lambda: setting(finite, _look_at_gradients=lambda *args: None),
        "numbers: the copy of the weights": lambda: setting(agent.rewind, offer=lambda *args: None),
        "steps in full": lambda: setting(step.short_steps, next_full=1 << 62),
        "batches": lambda: setting(
            agent.batches,
            requested=lambda iterator: None,
            index_drawn=lambda iterator, index: None,
            taken=lambda iterator: None,
            arrived=lambda batch, **more: None,
        ),
        "black box": lambda: setting(clock, _write=lambda: None),
        "leaks": lambda: setting(step, leaks=None),
    }


@contextlib.contextmanager
def setting(owner: Any, **attributes: Any) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)


def write_microseconds(folder: Path) -> float:
    """Microseconds of one write to the black box, which is a memory-mapped file."""
    box = BlackBox()
    rounds = []
    for _ in range(9):
        started = time.perf_counter()
        for step in range(20_000):
            box.write(1, step, 0, step, "/home/me/train.py", 12, 1 << 30, 0)
        rounds.append((time.perf_counter() - started) / 20_000 * 1e6)
    return round(statistics.median(rounds), 3)


def start_up_seconds(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds that `torchmedic run` adds to a script that only imports torch."""
    script = folder / "script.py"
    script.write_text("import torch\n")
    plain, watched = [sys.executable, str(script)], [sys.executable, "-m", "torchmedic", "run", str(script)]
    times: dict[str, list[float]] = {"plain": [], "torchmedic": []}
    keeps_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for number in range(rounds + 1):
        for name, command in (("plain", plain), ("torchmedic", watched)):
            started = time.perf_counter()
            subprocess.run(command, cwd=folder, env=keeps_bytecode, check=True)
            if number:  # the first round fills the file cache, and the bytecode, which an installed package has
                times[name].append(time.perf_counter() - started)
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {**medians, "added": round(medians["torchmedic"] - medians["plain"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, help="for each model; 20, on cuda 45")
    parser.add_argument("--ablate", action="store_true", help="only say what each part costs, on the smallest model")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the processor time of this process, for a machine that others work on too",
    )
    parser.add_argument("--starts", type=int, help="of Python; 7, on cuda 3")
    parser.add_argument("--processes", type=int, default=4, help="with and without torchmedic that take turns")
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json and NAME.md")
    args = parser.parse_args()
    on_card = args.device == "cuda"
    seconds = args.seconds or (45.0 if on_card else 20.0)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    warnings.filterwarnings("ignore", message="Anomaly Detection")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "run").mkdir()
        start_up = start_up_seconds(folder, args.starts or (3 if on_card else 7)) if not args.ablate else {}
        telling.install(str(folder / "run"))
        agent = lifecycle.current()
        assert agent is not None
        agent.hooks.remove()
        _away.append(time.monotonic())
        if args.ablate:
            for loads in (False, True):
                print(ablate(Loop(mlp, args.device, clock, loads=loads), agent, seconds), flush=True)
            return
        # This file counts as a user's file, and the black box is written.
        rows = [
            compare(Loop(mlp, args.device, clock, loads=loads), agent, seconds, SMALLEST_TARGET, args.processes)
            for loads in (False, True)
        ]
        rows += [
            compare(Loop(build, args.device, clock), agent, seconds, TARGET, args.processes)
            for build in MODELS[args.device]
        ]
        write = write_microseconds(folder)
    result = {
        **environment("cuda" if args.device == "cuda" else f"cpu, {os.cpu_count()} cores"),
        "threads": torch.get_num_threads(),
        "steps": rows,
        "black_box_write_us": write,
        "start_up_s": start_up,
    }
    text = table(result)
    print(text)
    save(args.output, result, "Overhead of the healthy path", text)


def processes(row: dict[str, Any]) -> str:
    return f"{row['processes_ratio']:.3f}x" if "processes_ratio" in row else "-"


def table(result: dict[str, object]) -> str:
    rows = result["steps"]
    assert isinstance(rows, list)
    others = {"debug_mode_ratio": "DebugMode", "underflow_overflow_ratio": "DebugUnderflowOverflow"}
    others = {key: title for key, title in others.items() if any(key in row for row in rows)}
    titles = ["model", "plain, ms", "torchmedic", "processes", "target", "first 64 steps", "detect_anomaly"]
    titles += others.values()
    lines = [
        "| " + " | ".join([*titles, "torchmedic's own, us a step"]) + " |",
        "|" + "---|" * (len(titles) + 1),
    ]
    for row in rows:
        cells = [f"{row[key]:.2f}x" if key in row else "-" for key in others]
        cells = [f"{row['first_steps_ratio']:.2f}x", f"{row['anomaly_ratio']:.2f}x", *cells]
        lines.append(
            f"| {row['model']} | {row['plain_ms']:.2f} | {row['torchmedic_ratio']:.3f}x | {processes(row)} "
            f"| {row['target']:.2f}x "
            f"| {' | '.join(cells)} | {row['own_us_per_step']:.0f} |"
        )
    start_up = result["start_up_s"]
    assert isinstance(start_up, dict)
    return "\n".join(
        [
            *lines,
            "",
            f"black box: {result['black_box_write_us']} us a write (target 3)",
            f"start-up: {start_up['plain']} s plain, {start_up['torchmedic']} s with torchmedic, "
            f"{start_up['added']} s added (target 0.2)",
            f"{result['device']}, torch {result['torch']}, Python {result['python']}: `{result['command']}`",
        ]
    )


if __name__ == "__main__":
    main()
