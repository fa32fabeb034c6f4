"""How long it takes from a device-side assert to the printed diagnosis, for a GPT-2 of 124M and one of 350M parameters.

A token beyond the vocabulary kills the device in the sixth batch. The clock starts when the script's own exception
leaves its training loop and stops when `torchmedic run` has ended, so that it covers the shadow replay, the trial of a
cure, the report and the end of the process. Needs CUDA.

    python benchmarks/crash_to_diagnosis.py --output crash-h200
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent

SCRIPT = """
import sys
import time

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, {folder!r})
from gpt import GPT, VOCABULARY

torch.manual_seed(0)
model = GPT({size!r}, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, VOCABULARY, (64, 1025))
tokens[45, 900] = VOCABULARY
try:
    for batch in DataLoader(tokens, batch_size=8):
        batch = batch.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
            labels = batch[:, 1:].clamp(max=VOCABULARY - 1)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
finally:
    print(time.time())
"""


def measure(size: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT.format(folder=str(HERE), size=size))
        done = subprocess.run(
            [sys.executable, "-m", "torchmedic", "run", "--output", "run", "train.py"],
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=280,
        )
        ended = time.time()
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    found = report["diagnoses"][0]
    return {
        "model": size,
        "seconds": round(ended - float(done.stdout.split()[-1]), 2),
        "code": found["code"],
        "grade": found["grade"],
        "cure_proven": any(each["proven"] for each in found["treatments"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json")
    arguments = parser.parse_args()
    rows = [measure(size) for size in ("gpt2-124m", "gpt2-350m")]
    for row in rows:
        print(row)
    if arguments.output:
        versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name(),
        }
        text = json.dumps({"command": " ".join(sys.argv), **versions, "rows": rows}, indent=1)
        (HERE / "results" / f"{arguments.output}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
