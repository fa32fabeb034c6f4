"""Memory that runs out in a DataLoader worker, and in plain Python objects: who holds it, and which line fills it.

A worker is alone in knowing what it holds: the verdicts are made there, and must be the same as in the main process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memory_limit import write_tree
from running import Finished, marked_line, run_script, torchmedic

HEAD = """import json, os, resource, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
def limited(worker=0, more=300):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (more << 20), -1))
ROW = json.dumps({"text": "word " * 12000, "tokens": list(range(300, 340)), "label": 1})
"""

IN_WORKERS = {
    "a-cache-in-every-worker": (
        "TM412",
        """
class Images(Dataset):
    def __init__(self):
        self.cache = {}
    def __len__(self):
        return 4000
    def read(self, i):
        return torch.ones(3, 256, 256)
    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.read(i)  # <- cause
        return self.cache[i].mean()
for x in DataLoader(Images(), batch_size=16, num_workers=2, worker_init_fn=limited):
    pass
""",
        (
            "`self.cache` has collected",
            "a cache that keeps",
            "of 2 (process",
            "each of the 2 workers has memory of its own",
        ),
    ),
    "a-file-that-is-read-whole": (
        "TM414",
        """
open("big.bin", "wb").truncate(900 << 20)
def load(path):
    with open(path, "rb") as file:
        return file.read()  # <- cause
class Shards(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(load("big.bin")[i])
for x in DataLoader(Shards(), batch_size=4, num_workers=1, worker_init_fn=limited):
    pass
""",
        ("there is no memory for 900.0 MiB, all of big.bin", "sample 1 of a batch of 4", "the limit is set here"),
    ),
    "padding-to-one-giant-sample": (
        "TM406",
        """
class Texts(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"ids": torch.zeros(3_000_000 if i == 21 else 100 + i, dtype=torch.long), "label": i}
class Collate:
    def __call__(self, items):
        ids = nn.utils.rnn.pad_sequence([each["ids"] for each in items])  # <- cause
        return ids, [each["label"] for each in items]
for x, y in DataLoader(Texts(), batch_size=32, num_workers=1, collate_fn=Collate(), worker_init_fn=limited):
    pass
""",
        ("dataset item 21 is [3000000], the other 31 samples of its batch about", "the batch takes 732.4 MiB"),
    ),
    "rows-as-dicts-of-a-stream": (
        "TM412",
        """
class Lines(IterableDataset):
    def __iter__(self):
        rows = []
        while True:
            rows.append(json.loads(ROW))  # <- cause
            if len(rows) > 10_000_000:
                yield rows.pop()["label"]
for x in DataLoader(Lines(), batch_size=2, num_workers=1, worker_init_fn=limited):
    pass
""",
        ("`rows` has collected", " dicts", "Python objects of yours"),
    ),
    "rows-so-small-that-not-a-byte-is-left": (
        "TM412",
        """
SMALL = json.dumps({"text": "word " * 80, "tokens": list(range(300, 340)), "label": 1})
class Lines(IterableDataset):
    def __iter__(self):
        rows = []
        while True:
            rows.append(json.loads(SMALL))  # <- cause
            if len(rows) > 10_000_000:
                yield rows.pop()["label"]
for x in DataLoader(Lines(), batch_size=2, num_workers=1, worker_init_fn=lambda worker: limited(more=120)):
    pass
""",
        ("`rows` has collected", " dicts"),
    ),
}

IN_MAIN = {
    "rows-as-dicts": (
        "TM412",
        """
class Rows(Dataset):
    def __init__(self, lines):
        self.rows = []
        for line in lines:
            self.rows.append(json.loads(line))  # <- cause
    def __len__(self):
        return len(self.rows)
limited()
data = Rows(ROW for _ in range(10_000_000))
""",
        ("`self.rows` has collected", " dicts", "Python objects of yours"),
    ),
    "a-list-that-is-still-being-made": (
        "TM414",
        """
def read(count):
    for i in range(count):
        yield np.random.rand(4096)
limited()
data = list(read(10_000_000))  # <- cause
""",
        ("went away when it failed: no name led to what was being collected",),
    ),
}


def check(finished: Finished, source: str, code: str, words: tuple[str, ...]) -> None:
    found = finished.only
    told = "\n".join([found.message, found.cause, *found.evidence, *(place.label for place in found.locations)])
    place = found.cause_location
    assert (found.code, place and place.line) == (code, marked_line(source)), finished.stderr
    assert all(word in told for word in words), finished.stderr
    assert "fault of its own" not in finished.stderr
    assert finished.report.outcome.symptom == "out-of-memory"


def test_a_worker_says_who_holds_its_memory(tmp_path: Path) -> None:
    for name, (code, body, words) in (IN_WORKERS | IN_MAIN).items():
        (tmp_path / name).mkdir()
        check(run_script(tmp_path / name, HEAD + body), HEAD + body, code, words)


KILLED = (
    HEAD
    + """
class Images(Dataset):
    def __init__(self):
        self.cache = {}
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        self.cache[i] = torch.ones(1 << 18)  # <- cause
        first = torch.utils.data.get_worker_info().id == 0
        if first and len(self.cache) == 120:
            open("filled", "w").close()
        if not first and len(self.cache) == 150:
            while not os.path.exists("filled"):
                time.sleep(0.01)
            os.replace("later", "cgroup")  # as the kernel does
            os.kill(os.getpid(), 9)
        return self.cache[i].mean()
for x in DataLoader(Images(), batch_size=10, num_workers=2):
    pass
"""
)


def test_a_worker_that_lives_on_says_what_the_killed_one_held(tmp_path: Path) -> None:
    for kills, link in enumerate(("cgroup", "later")):
        write_tree(tmp_path / f"killed-{kills}", 1 << 30, kills, None)
        (tmp_path / link).symlink_to(tmp_path / f"killed-{kills}")
    finished = run_script(tmp_path, KILLED, TORCHMEDIC_CGROUP_ROOT=str(tmp_path / "cgroup"))
    place = finished.only.cause_location
    assert (finished.only.code, place and place.line) == ("TM417", marked_line(KILLED)), finished.stderr
    assert "cache` held" in "\n".join(finished.only.evidence)


SPAWNED = (
    HEAD
    + """
class Noise(Dataset):
    def __init__(self):
        self.history = []
    def __len__(self):
        return 64
    def __getitem__(self, i):
        self.history.append(np.ones(1 << 17))  # <- cause
        return torch.from_numpy(self.history[-1][:4])
if __name__ == "__main__":
    loader = DataLoader(
        Noise(),
        batch_size=8,
        num_workers=1,
        worker_init_fn=limited,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for epoch in range(200):
        for x in loader:
            pass
"""
)


@pytest.mark.slow
def test_a_worker_that_was_spawned_and_lives_on_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    check(torchmedic(tmp_path, "train.py"), SPAWNED, "TM412", ("`self.history` has collected", " arrays"))


RECOVERED = (
    HEAD
    + """
class Data(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.from_numpy(np.zeros(1 << (31 if i == 5 else 3), dtype=np.uint8))
loader = iter(DataLoader(Data(), batch_size=4, num_workers=1, worker_init_fn=limited))
good = 0
while True:
    try:
        next(loader)
        good += 1
    except StopIteration:
        break
    except (MemoryError, RuntimeError) as error:
        print("one batch was too large:", str(error).splitlines()[0])
print(good, "batches")
"""
)


def test_a_run_that_gets_over_it_is_left_alone(tmp_path: Path) -> None:
    finished = run_script(tmp_path, RECOVERED)
    assert (finished.returncode, finished.report.diagnoses) == (0, ()), finished.stderr
    assert finished.stdout == "one batch was too large: Caught MemoryError in DataLoader worker process 0.\n3 batches\n"
    assert not (finished.run / "stacks").exists()  # nothing is left of the copy that looked


ASKED = (
    HEAD
    + """
import threading
class Loader:
    def __init__(self):
        self.rows = []
    def read(self):
        while len(self.rows) < 2_000:
            self.rows.append(json.loads(ROW))  # <- cause
loader = Loader()
loader.read()
with open(f"run/inside/{os.getpid()}.ask", "wb", buffering=0) as question:
    question.write(b"h")
end = time.monotonic() + 60
while not os.path.exists(f"run/inside/{os.getpid()}.held") and time.monotonic() < end:
    time.sleep(0.01)
print(open(f"run/inside/{os.getpid()}.held").read())
"""
)


def test_a_process_that_is_asked_who_holds_its_memory_answers(tmp_path: Path) -> None:
    finished = run_script(tmp_path, ASKED)
    (held,) = json.loads(finished.stdout)
    assert (held["name"], held["items"], held["line"]) == ("loader.rows", 2_000, marked_line(ASKED)), finished.stderr
    assert 90 << 20 < held["nbytes"] < 200 << 20
