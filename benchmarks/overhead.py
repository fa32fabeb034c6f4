"""What the healthy path costs: the time of a step without torchmedic, with it, and under `detect_anomaly`.

All three are measured in one process, in short blocks that take turns, and compared block by block, so that a machine
that speeds up or slows down meanwhile changes nothing. Start-up is measured by starting things, in turns too.

    python benchmarks/overhead.py [--device cuda] [--clock cpu] [--output NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from torchmedic.observe import agent as agents
from torchmedic.observe.blackbox import BlackBox

RESULTS = Path(__file__).parent / "results"
TARGETS = {"mlp": 1.05, "cnn": 1.01, "transformer": 1.01}
MODES = ("plain", "torchmedic", "anomaly")


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


class Loop:
    """The loop that everybody writes."""

    def __init__(
        self, build: Callable[[str], tuple[nn.Module, torch.Tensor]], device: str, clock: Callable[[], float]
    ) -> None:
        torch.manual_seed(0)
        self.clock = clock
        model, batch = build(device)
        self.model, self.batch, self.device = model.to(device), batch.to(device), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def block(self, steps: int) -> float:
        """Seconds per step."""
        self._wait()
        started = self.clock()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.batch).square().mean()
            loss.backward()
            self.optimizer.step()
        self._wait()
        return (self.clock() - started) / steps

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def compare(name: str, loop: Loop, agent: agents.Agent, seconds: float) -> dict[str, float | str]:
    """Blocks of all modes in turns; the median of the ratios of neighbours."""
    hooks = agent.hooks
    hooks.remove()
    removed = time.monotonic()
    loop.block(20)
    steps = max(2, int(0.03 / loop.block(20)))
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times["plain"]) < 10:
        # Whoever comes first in a round has the warmer or the colder machine: they take turns at that too.
        for mode in MODES if len(times["plain"]) % 2 else (*reversed(MODES[:2]), MODES[2]):
            if mode == "torchmedic":
                hooks.install()
                # The time that may be spent on looking at numbers is a share of the time under watch.
                agent.finite._started += time.monotonic() - removed
            with torch.autograd.detect_anomaly() if mode == "anomaly" else contextlib.nullcontext():
                loop.block(1)  # what has just been put in place is warm
                times[mode].append(loop.block(steps if mode != "anomaly" else max(2, steps // 4)))
            if mode == "torchmedic":
                hooks.remove()
                removed = time.monotonic()
    pairs = {mode: [a / b for a, b in zip(times[mode], times["plain"], strict=True)] for mode in MODES}
    plain = statistics.median(times["plain"])
    ratio = statistics.median(pairs["torchmedic"])
    return {
        "model": name,
        "plain_ms": round(plain * 1e3, 3),
        "torchmedic_ratio": round(ratio, 4),
        "anomaly_ratio": round(statistics.median(pairs["anomaly"]), 2),
        "own_us_per_step": round((ratio - 1) * plain * 1e6, 1),
        "rounds": len(times["plain"]),
        "target": TARGETS[name],
    }


def write_microseconds(folder: Path) -> float:
    """One entry of the black box, into memory that is mapped from a file."""
    box = BlackBox(folder / "box")
    rounds = []
    for _ in range(9):
        started = time.perf_counter()
        for step in range(20_000):
            box.write(1, step, 0, step, "/home/me/train.py", 12, 1 << 30, 0)
        rounds.append((time.perf_counter() - started) / 20_000 * 1e6)
    return round(statistics.median(rounds), 3)


def start_up_seconds(folder: Path, rounds: int) -> dict[str, float]:
    """What `torchmedic run` adds to the start and the end of a script that only imports torch."""
    script = folder / "script.py"
    script.write_text("import torch\n")
    plain, watched = [sys.executable, str(script)], [sys.executable, "-m", "torchmedic", "run", str(script)]
    times: dict[str, list[float]] = {"plain": [], "torchmedic": []}
    for number in range(rounds + 1):
        for name, command in (("plain", plain), ("torchmedic", watched)):
            started = time.perf_counter()
            subprocess.run(command, cwd=folder, check=True)
            if number:  # the first fills the file cache
                times[name].append(time.perf_counter() - started)
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {**medians, "added": round(medians["torchmedic"] - medians["plain"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the processor time of this process, for a machine that others work on too",
    )
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json and NAME.md")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    warnings.filterwarnings("ignore", message="Anomaly Detection")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "run").mkdir()
        start_up = start_up_seconds(folder, args.starts)
        agents.install(str(folder / "run"))
        agent = agents.current()
        assert agent is not None
        # As a user's file would be seen: this one is, and the box is written.
        rows = [
            compare(build.__name__, Loop(build, args.device, clock), agent, args.seconds)
            for build in (mlp, cnn, transformer)
        ]
        write = write_microseconds(folder)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "steps": rows,
        "black_box_write_us": write,
        "start_up_s": start_up,
    }
    text = table(result)
    print(text)
    if args.output:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.output}.json").write_text(json.dumps(result, indent=2) + "\n")
        (RESULTS / f"{args.output}.md").write_text(f"# Overhead of the healthy path\n\n{text}\n")


def table(result: dict[str, object]) -> str:
    lines = [
        "| model | plain, ms | torchmedic | target | detect_anomaly | torchmedic's own, us a step |",
        "|---|---|---|---|---|---|",
    ]
    rows = result["steps"]
    assert isinstance(rows, list)
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['plain_ms']:.2f} | {row['torchmedic_ratio']:.3f}x | {row['target']:.2f}x "
            f"| {row['anomaly_ratio']:.2f}x | {row['own_us_per_step']:.0f} |"
        )
    start_up = result["start_up_s"]
    assert isinstance(start_up, dict)
    return "\n".join(
        [
            *lines,
            "",
            f"black box: {result['black_box_write_us']} us a write (target 3)",
            f"start-up: {start_up['plain']} s plain, {start_up['torchmedic']} s with torchmedic, "
            f"{start_up['added']} s added (target 0.3)",
            f"{result['device']}, torch {result['torch']}, Python {result['python']}: `{result['command']}`",
        ]
    )


if __name__ == "__main__":
    main()
