"""How long it takes from an out-of-memory to the printed diagnosis, for GPT-2 sizes, and what the autopsy itself takes.

The card is made small in the third step, so that the backward pass runs out. The clock starts when the script's own
exception leaves its training loop and stops when `torchmedic run` has ended. The script's own excepthook brackets the
autopsy: memory of the device (peak against what the exception left) and of the host (peak RSS against the RSS before).

    python benchmarks/oom_to_diagnosis.py --output oom-h200          # needs CUDA
    python benchmarks/oom_to_diagnosis.py --device cpu               # a small GPT under an address-space limit

Bars: under 10 s, 0 bytes of the device, under 500 MB of the host, for gpt2-350m.
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
import json
import resource
import sys
import threading
import time

import torch

sys.path.insert(0, {folder!r})
import gpt

gpt.SIZES["small"] = (6, 4, 128)
DEVICE = {device!r}
torch.manual_seed(0)
model = gpt.GPTLoss({size!r}, 1024, DEVICE).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def shrink():
    if DEVICE == "cpu":
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, -1))
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)


def device_memory():
    if DEVICE == "cpu":
        return [0, 0]
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


before = sys.excepthook
highest, ended = [0], threading.Event()
def watch():
    while not ended.wait(0.005):
        highest[0] = max(highest[0], rss())
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
def look(kind, error, tb):
    first = highest[0] = rss()
    if DEVICE != "cpu":
        torch.cuda.reset_peak_memory_stats()
    device = device_memory()
    started = time.time()
    before(kind, error, tb)
    took = time.time() - started
    ended.set()
    watcher.join()
    after = device_memory()
    print(json.dumps([started, took, highest[0] - first, after[0] - device[0], after[1] - device[1]]), flush=True)
sys.excepthook = look

for step in range(4):
    tokens = torch.randint(0, gpt.VOCABULARY, ({batch}, {length}), device=DEVICE)
    optimizer.zero_grad()
    loss = model(tokens)
    if step == 2:
        shrink()
    loss.backward()
    optimizer.step()
"""


def measure(size: str, device: str, batch: int, length: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        script = SCRIPT.format(folder=str(HERE), size=size, device=device, batch=batch, length=length)
        (Path(folder) / "train.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "-m", "torchmedic", "run", "--output", "run", "train.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        ended = time.time()
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
        events = (Path(folder) / "run" / "rank0" / "events.jsonl").read_text().splitlines()
    autopsies = [event for line in events if (event := json.loads(line))["kind"] == "memory-autopsy"]
    if not done.stdout.strip() or not autopsies:
        sys.exit(f"it did not run out of memory as it should:\n{done.stderr[-3000:]}")
    started, took, host, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    return {
        "size": size,
        "seconds_to_the_end": round(ended - started, 2),
        "seconds_of_the_autopsy": round(took, 2),
        "host_bytes": host,
        "device_bytes_allocated": allocated,
        "device_bytes_reserved": reserved,
        "diagnosis": report["diagnoses"][-1]["code"],
        "method": autopsies[0]["method"],
        "rows": autopsies[0]["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    sizes = [("gpt2-124m", 8, 1025), ("gpt2-350m", 8, 1025)] if arguments.device == "cuda" else [("small", 1, 129)]
    rows = [measure(size, arguments.device, batch, length) for size, batch, length in sizes]
    for row in rows:
        print(
            f"{row['size']}: {row['seconds_to_the_end']} s to the end, {row['seconds_of_the_autopsy']} s of the "
            f"autopsy, device {row['device_bytes_allocated']} B, host {int(str(row['host_bytes'])) / 1e6:.0f} MB, "
            f"{row['diagnosis']}, {row['method']}"
        )
    if arguments.output:
        versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
        text = json.dumps({"command": " ".join(sys.argv), **versions, "rows": rows}, indent=1)
        (HERE / "results" / f"{arguments.output}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
