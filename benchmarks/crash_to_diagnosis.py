"""Time from a device-side assert to the printed diagnosis, for GPT-2 with 124M and 350M parameters.

A token outside the vocabulary kills the device in the sixth batch. The clock starts when the script's exception leaves
the training loop and stops when `torchmedic run` has ended. It covers the shadow replay, the trial of a cure, the
report and the end of the process. Needs CUDA.

    python benchmarks/crash_to_diagnosis.py --output crash-h200
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from measured_run import environment, run_under_torchmedic, save

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
        done, diagnoses = run_under_torchmedic(Path(folder), SCRIPT.format(folder=str(HERE), size=size))
        ended = time.time()
    found = diagnoses[0]
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
    save(arguments.output, {**environment("cuda"), "rows": rows})


if __name__ == "__main__":
    main()
