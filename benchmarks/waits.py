"""Compares the reported cost of a wait for the device (TM619) with the time saved without that wait. Needs CUDA.

python benchmarks/waits.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import sys, time
import torch
from torch import nn
waits, width, rows, rest = sys.argv[1] == "with", *map(int, sys.argv[2:4]), float(sys.argv[4])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)), nn.Linear(width, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
x, y = torch.randn(rows, width, device="cuda"), torch.randn(rows, 1, device="cuda")
for step in range(400):
    if step == 200:
        torch.cuda.synchronize()
        began = time.perf_counter()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if waits:
        torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(rest) if rest else None
torch.cuda.synchronize()
print((time.perf_counter() - began) / 200)
"""
CASES = [(256, 512, 0.0), (1024, 2048, 0.0), (2048, 4096, 0.0), (4096, 4096, 0.0), (2048, 4096, 0.002)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        for number, case in enumerate(CASES):
            words = [str(word) for word in case]
            times = [float(_run(folder, "train.py", way, *words)) for way in ("with", "without")]
            run = folder / f"run{number}"
            _run(folder, "-m", "torchmedic", "run", "--output", str(run), "train.py", "with", *words)
            found = json.loads((run / "report.json").read_text())["diagnoses"]
            said = [one["message"] for one in found if one["code"] == "TM619"] or ["nothing"]
            truth = 1 - times[1] / times[0]
            print(
                f"width {case[0]}, {case[1]} rows, {case[2] * 1e3:.0f} ms of rest: a step takes {times[0] * 1e3:.3f} ms"
            )
            print(f"  leaving the wait out saves {truth:.1%}; said: {said[0]}", flush=True)


def _run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
