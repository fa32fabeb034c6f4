"""The cost of the progress watch: the parent's share of a core, and the speed of the run while it is examined.

    python benchmarks/watchdog.py --seconds 20

The first is the CPU time of the supervising process while a script trains. The second compares the steps per second of
the same script during examinations with those between examinations, in one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchmedic.runfolder import questions

SCRIPT = """
import time
import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(64, 256), torch.randn(64, 1)
end = time.monotonic() + {seconds}
steps, begin = 0, time.monotonic()
with open("speed.txt", "w") as file:
    while time.monotonic() < end:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps += 1
        if time.monotonic() - begin > 0.25:
            file.write(f"{{time.time()}} {{steps / (time.monotonic() - begin)}}\\n")
            file.flush()
            steps, begin = 0, time.monotonic()
"""


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def measure(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "train.py").write_text(SCRIPT.format(seconds=seconds + 3))
        command = [sys.executable, "-m", "torchmedic", "run", "--no-checkup", "-o", "run", "train.py"]
        parent = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        while not (folder / "speed.txt").exists() or not (folder / "speed.txt").stat().st_size:
            time.sleep(0.1)
        time.sleep(2)
        child = questions.listeners(folder / "run")[0]
        before, begin = cpu(parent.pid), time.monotonic()
        examined: list[tuple[float, float]] = []
        quiet = seconds / 2
        time.sleep(quiet)
        used = (cpu(parent.pid) - before) / (time.monotonic() - begin)
        while time.monotonic() - begin < seconds:
            asked = time.time()
            questions.ask(folder / "run", child)
            time.sleep(1.25)
            examined.append((asked, asked + 1.25))
            time.sleep(1.25)
        parent.wait()
        rows = [tuple(map(float, line.split())) for line in (folder / "speed.txt").read_text().splitlines()]
        since = examined[0][0] - 0.5
        during = [speed for when, speed in rows if any(low + 0.25 < when < high for low, high in examined)]
        around = [
            speed
            for when, speed in rows
            if when > since and not any(low < when < high + 0.25 for low, high in examined)
        ]
    print(f"the parent uses {used:.3%} of a core (bar 0.1 %)")
    ratio = statistics.median(during) / statistics.median(around)
    print(f"steps a second while examined / while not: {ratio:.4f} (bar 0.99), {len(during)} and {len(around)} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    measure(parser.parse_args().seconds)
