"""Limits of the host: address space, shared memory, pinned memory, memory of a card that others ask for.

Each verdict with its line, in loops of other shapes than those of the pages; and code near a limit that gets on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from machines import placed_on
from running import Finished, clean_environment, marked_line, run_script
from small_shm import run_in_small_shm

IMAGES = """import glob, os, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Images(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.randn(3, 512, 512), i % 10
"""

SHARED = {
    "batches-of-a-trainer": (
        IMAGES
        + """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 512 * 512, 10))
        self.loader = DataLoader(Images(), batch_size=8, num_workers=2, prefetch_factor=3)  # <- cause
    def fit(self):
        for x, y in self.loader:
            nn.functional.cross_entropy(self.model(x), y).backward()
Trainer().fit()
""",
        "no room for 24.0 MiB in /dev/shm (8.0 MiB)",
        "2 workers x 3 batches ahead (prefetch_factor) x 24.0 MiB: up to 144.0 MiB",
    ),
    "a-batch-that-is-lost-on-its-way": (
        IMAGES
        + """
def collate(items):
    return {"x": torch.stack([x for x, _ in items])}
def give_up():
    while not glob.glob("run/*/diagnosis-*.json"):
        time.sleep(0.05)
    os._exit(1)
threading.Thread(target=give_up, daemon=True).start()
for batch in DataLoader(Images(), batch_size=8, num_workers=2, collate_fn=collate):  # <- cause
    pass
""",
        "no room for 24.0 MiB",
        "what was sent is lost: the process that waits for it is told nothing, and may wait for ever",
    ),
    "batches-that-are-kept": (
        IMAGES
        + """
data = TensorDataset(torch.randn(4000, 1024), torch.randn(4000, 1))
model = nn.Linear(1024, 1)
seen = []
for x, y in DataLoader(data, batch_size=500, num_workers=1):
    loss = (model(x) - y).square().mean()
    loss.backward()
    seen.append((x, y, loss.item()))  # <- cause
""",
        "no room for 2.0 MiB",
        "`seen` holds",
    ),
    "weights-that-are-shared-by-a-helper": (
        IMAGES
        + """
class Actor:
    def __init__(self, width):
        self.net = nn.Sequential(nn.Linear(width, 2048), nn.ReLU(), nn.Linear(2048, width))
        self.net.share_memory()  # <- cause
actors = [Actor(512) for _ in range(4)]
""",
        "no room for 4.0 MiB",
        "of 8.0 MiB are taken now",
    ),
    "a-lock-and-what-others-have-left": (
        """import multiprocessing
import torch
with open("/dev/shm/left.bin", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
queue = multiprocessing.Queue()  # <- cause
""",
        "shared memory is full in /dev/shm (8.0 MiB)",
        "open, such as /dev/shm/left.bin",
    ),
}


def check(finished: Finished, code: str, source: str, *words: str) -> None:
    found = finished.only
    told = "\n".join([found.message, found.cause, *found.evidence])
    assert found.code == code, finished.stderr
    assert found.cause_location is not None, finished.stderr
    assert found.cause_location.line == marked_line(source), finished.stderr
    assert all(word in told for word in words), finished.stderr
    assert "fault of its own" not in finished.stderr


def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    for name, (source, *words) in SHARED.items():
        (tmp_path / name).mkdir()
        check(run_in_small_shm(tmp_path / name, source), "TM415", source, *words)


HEALTHY_SHARED = (
    IMAGES
    + """
def shared(tensor):
    try:
        return tensor.share_memory_()
    except RuntimeError:
        return tensor  # then every process has its own
kept = [shared(torch.zeros(1 << 20)) for _ in range(3)]
del kept
data = TensorDataset(torch.randn(2000, 512))
model = nn.Linear(512, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in DataLoader(data, batch_size=400, num_workers=2):  # about half of what there is
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""
)
OWN_WORDS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 7:
            raise RuntimeError("unable to allocate shared memory: the budget is used up")  # <- cause
        return torch.ones(3)
for x in DataLoader(Data(), batch_size=4, num_workers=1):
    pass
"""


def test_shared_memory_that_suffices_and_words_of_the_users_own(tmp_path: Path) -> None:
    for name in ("healthy", "own"):
        (tmp_path / name).mkdir()
    check(run_script(tmp_path / "own", OWN_WORDS), "TM820", OWN_WORDS)
    finished = run_in_small_shm(tmp_path / "healthy", HEALTHY_SHARED)
    assert (finished.returncode, finished.report.diagnoses) == (0, ()), finished.stderr


LIMITS = {
    "a-helper-under-a-limit-of-data": (
        """
import resource
import numpy as np
import torch
resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, -1))
def load(rows):
    return np.zeros((rows, 1024))  # <- cause
for rows in (1000, 300_000):
    features = torch.from_numpy(load(rows))
""",
        "there is no memory for 2.3 GiB: the process may have 1.5 GiB of private memory",
        "(RLIMIT_DATA, `ulimit -d`)",
    ),
    "a-worker-that-limits-itself": (
        """
import resource
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.empty((1 << 20) * (1 if i < 4 else 1000))[:4]  # <- cause
def limited(worker):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (900 << 20), used + (900 << 20)))
for x in DataLoader(Data(), batch_size=2, num_workers=1, worker_init_fn=limited):
    pass
""",
        "there is no memory for 3.9 GiB",
        "(RLIMIT_AS, `ulimit -v`)",
    ),
    "threads-whose-stacks-have-no-room": (
        """
import resource
import threading
import torch
class Pool:
    def __init__(self, count):
        self.closed = threading.Event()
        for number in range(count):
            thread = threading.Thread(target=self.closed.wait, daemon=True)
            thread.start()  # <- cause
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), -1))
Pool(1000)
""",
        "of address space",
        "(RLIMIT_AS, `ulimit -v`)",
    ),
}


def test_limits_that_the_script_sets_itself(tmp_path: Path) -> None:
    for name, (source, *words) in LIMITS.items():
        (tmp_path / name).mkdir()
        finished = run_script(tmp_path / name, source)
        check(finished, "TM414", source, *words)
        set_at = [place for place in finished.only.locations if place.label == "the limit is set here"]
        assert [place.code.split("(")[0] for place in set_at] == ["resource.setrlimit"], finished.stderr


HARD = """
import torch
rows = []
class Store:
    def keep(self, number):
        rows.append(bytes(number))  # <- cause
store = Store()
while True:
    store.keep(16384)
"""


def test_a_hard_limit_that_leaves_no_room_to_look(tmp_path: Path) -> None:
    """Of a shell: soft and hard are the same, and the process has used up all of it in small pieces."""
    (tmp_path / "train.py").write_text(HARD)
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 1500000; exec {sys.executable} -m torchmedic run --output run train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    finished = Finished(done.returncode, done.stdout, done.stderr, tmp_path / "run")
    check(finished, "TM414", HARD, "the process may have 1.4 GiB of address space", "the limit is inherited")
    assert (done.returncode, finished.report.outcome.symptom) == (1, "out-of-memory")


PINNED = {
    "a-loader-of-a-trainer": """
import torch
from torch.utils.data import DataLoader, TensorDataset
class Trainer:
    def __init__(self):
        data = TensorDataset(torch.randn(8, 3000))
        self.loader = DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)  # <- cause
    def fit(self):
        for (x,) in self.loader:
            x.to("cuda", non_blocking=True)
Trainer().fit()
""",
    "a-helper-that-stages": """
import torch
def stage(batch):
    return batch.pin_memory().to("cuda", non_blocking=True)  # <- cause
for batch in torch.randn(3, 1000, 3000):
    stage(batch)
""",
    "buffers-made-beforehand": """
import torch
class Buffers:
    def __init__(self, rows):
        self.parts = [torch.empty(rows, 1024, 300, pin_memory=True) for _ in range(2)]  # <- cause
Buffers(900)
""",
}


def test_memory_that_is_not_pinned(tmp_path: Path) -> None:
    for name, body in PINNED.items():
        (tmp_path / name).mkdir()
        source = placed_on("host that pins no more", body)
        check(run_script(tmp_path / name, source), "TM416", source, "could not be pinned", "it is not the GPU")


@pytest.mark.parametrize(
    ("words", "who"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuBLAS"),
        ("CUDA error: out of memory", "the driver"),
        ("NCCL error in: a.hpp:275, unhandled cuda error. Last error: Cuda failure 2 out of memory", "NCCL"),
    ],
)
def test_memory_of_a_card_that_others_ask_for_is_told_as_memory(tmp_path: Path, words: str, who: str) -> None:
    body = """import torch
from torch import nn

model = nn.Linear(8, 4).to("cuda")
x = torch.randn(2, 8).to("cuda")
loss = model(x).mean()  # <- cause
loss.backward()
"""
    source = placed_on("full gpu", body).replace(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", words
    )
    finished = run_script(tmp_path, source)
    check(finished, "TM402", source, f"{who} found no memory on cuda:0: 12.0 MiB are free", "in use on the device")
    assert finished.report.outcome.symptom == "out-of-memory"


REFUSED = """
import torch
from torch import nn
model = nn.Linear(8, 4)
def table(rows):
    return torch.zeros(rows, 1 << 20)  # <- cause
table(600)
"""


def test_a_refusal_that_only_the_limit_of_the_container_explains(tmp_path: Path) -> None:
    """As in a sandbox that refuses what the kernel would grant."""
    for folder in (tmp_path / "cgroup", tmp_path / "cgroup" / "memory"):
        folder.mkdir()
        (folder / "memory.max").write_text("1073741824\n")
        (folder / "memory.limit_in_bytes").write_text("1073741824\n")
    source = placed_on("sandbox that refuses", REFUSED.lstrip())
    finished = run_script(tmp_path, source, TORCHMEDIC_CGROUP_ROOT=str(tmp_path / "cgroup"))
    check(finished, "TM417", source, "there is no memory for 2.3 GiB", "its cgroup may hold 1.0 GiB")
    assert finished.only.grade == "likely"
