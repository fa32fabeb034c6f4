"""Time from an out-of-memory to the printed diagnosis, for GPT-2 sizes, and the cost of the autopsy itself.

The device memory is limited in the third step, so that the backward pass runs out of memory. The clock starts when the
script's exception leaves the training loop and stops when `torchmedic run` has ended. The script's excepthook measures
the autopsy: device memory (peak, against what the exception left) and host memory (peak RSS, against the RSS before).

    python benchmarks/oom_to_diagnosis.py --output oom-h200          # needs CUDA
    python benchmarks/oom_to_diagnosis.py --device cpu               # a small GPT under an address-space limit

Bars: under 10 s, 0 bytes of the device, under 500 MB of the host, for gpt2-350m.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from measured_run import environment, run_under_torchmedic, save

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
        done, diagnoses = run_under_torchmedic(Path(folder), script)
        ended = time.time()
        events = (Path(folder) / "run" / "rank0" / "events.jsonl").read_text().splitlines()
    autopsies = [event for line in events if (event := json.loads(line))["kind"] == "memory-autopsy"]
    if not done.stdout.strip() or not autopsies:
        sys.exit(f"the script did not run out of memory:\n{done.stderr[-3000:]}")
    started, took, host, allocated, reserved = json.loads(done.stdout.splitlines()[-1])
    return {
        "size": size,
        "seconds_to_the_end": round(ended - started, 2),
        "seconds_of_the_autopsy": round(took, 2),
        "host_bytes": host,
        "device_bytes_allocated": allocated,
        "device_bytes_reserved": reserved,
        "diagnosis": diagnoses[-1]["code"],
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
    save(arguments.output, {**environment(arguments.device), "rows": rows})


if __name__ == "__main__":
    main()
