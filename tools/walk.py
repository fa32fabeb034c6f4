"""Count the files on the way of a NaN and of an out-of-memory: `python tools/walk.py [--list]`.

Counted are the files of torchmedic with a function that runs between the incident and the written report, in the order
of their first call, and the switches between packages in that order. What runs at import does not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

TOOLS = Path(__file__).parent
PACKAGE = str(TOOLS.parent / "src" / "torchmedic") + os.sep
LOG = "TORCHMEDIC_WALK"
FIRST_CALLS = {"Conductor.explain_nonfinite", "Conductor.explain_exception", "Ledger.publish"}

WATCHED = f"import sys; sys.path.append({str(TOOLS)!r}); import walk; walk.watch()\n"
SUPERVISOR = f"{WATCHED}from torchmedic.cli import main; sys.exit(main())"
TRAINING = """
import resource, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
kept = []
"""
SCRIPTS = {
    "NaN": """
for step in range(6):
    x = torch.randn(8, 64)
    if step == 4:
        x[0] = 0.0
    norm = x.norm(dim=1, keepdim=True)
    loss = (model(x / norm) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "out of memory": """
for step in range(60):
    if step == 2:
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, -1))
    x = torch.randn(20000, 64)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(model(x) * 2)
""",
}


def watch() -> None:
    """Log each file of torchmedic at its first call after an incident, in every thread of this process."""
    # Opened now: there may be no memory for it after the incident.
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[str] = set()
    explained: list[FrameType] = []  # calls of FIRST_CALLS that have not returned
    imported: list[FrameType] = []  # modules whose import has not ended

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return":
            for begun in (explained, imported):
                if begun and begun[-1] is frame:
                    begun.pop()
        elif event == "call" and code.co_name == "<module>":
            imported.append(frame)
        elif event == "call" and code.co_filename.startswith(PACKAGE):
            if code.co_qualname in FIRST_CALLS:
                explained.append(frame)
            if explained and not imported and code.co_filename not in seen:
                seen.add(code.co_filename)
                os.write(log, f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def walk(script: str) -> tuple[str, list[str]]:
    """The first line of the report on a script, and "file function" of each file on the way to the report."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "train.py"), Path(folder, "walk.log")
        path.write_text(WATCHED + TRAINING + script)
        command = [sys.executable, "-c", SUPERVISOR, "run", str(path)]
        environment = {**os.environ, LOG: str(log), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
        found = next((line for line in done.stderr.splitlines() if line.startswith("error[")), "no error was found")
        calls: dict[str, str] = {}
        for line in log.read_text().splitlines():  # of the script, and then of its supervisor
            calls.setdefault(line.split()[0], line)
    return found, list(calls.values())


def main() -> None:
    """Print both walks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the files, each with its first function")
    listed = parser.parse_args().list
    for name, script in SCRIPTS.items():
        found, calls = walk(script)
        packages = [call.split("/")[0] for call in calls]
        switches = sum(before != after for before, after in itertools.pairwise(packages))
        print(f"{name}: {len(calls)} files, {switches} switches between packages ({found})")
        if listed:
            print(*calls, sep="\n")


if __name__ == "__main__":
    main()
