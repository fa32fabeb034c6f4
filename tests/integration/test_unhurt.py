"""A replay of the failed step does nothing a second time: not to files, not to other processes, not to the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Finished, run_script

# What a step may do besides computing, all of it below the loss: nothing of it is a statement of the step's own.
HEAD = """
import atexit, collections, csv, gzip, json, logging, os, pathlib, pickle, queue, random, shutil, sqlite3, subprocess
import sys, threading
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
"""
MUTED = """
class Books:
    total = 0

    def __init__(self):
        self.steps, self.average, self.last = 0, 0.0, collections.deque(maxlen=3)
        self.kept, self.counts, self.mean = [], collections.Counter(), np.zeros(2)
        self.rng, self.draws = random.Random(1), np.random.default_rng(1)

BOOKS, EMA, QUEUE, CYCLE = Books(), {}, queue.Queue(), iter([*range(100)])
TEXT, ROWS, RAW = open("text.log", "w"), csv.writer(open("rows.csv", "w")), open("raw.bin", "wb")
WRITE = sys.stdout.write
logging.basicConfig(filename="run.log", level=logging.INFO)
turns = 0

def keep_books(i):
    global turns
    turns += 1
    Books.total += 1
    BOOKS.steps += 1
    BOOKS.average = 0.9 * BOOKS.average + i
    BOOKS.last.append(i)
    BOOKS.counts["steps"] += 1
    BOOKS.mean += BOOKS.draws.random() + BOOKS.rng.random() + next(CYCLE)
    for name, weight in model.named_parameters():
        EMA.setdefault(name, weight.detach().clone()).lerp_(weight.detach(), 0.1)
    QUEUE.put(i)
    TEXT.write(f"{i}\\n")
    print(i, file=TEXT, flush=True)
    ROWS.writerow([i])
    RAW.write(bytes([i]))
    WRITE(f"written {i}\\n")
    os.write(1, b"")
    sys.__stdout__.write(f"raw {i}\\n")
    logging.info("step %d", i)
    with open("appended.txt", "a") as file:
        file.write(f"{i}\\n")
    pathlib.Path("latest.json").write_text(json.dumps(list(BOOKS.last)))
    os.makedirs(f"checkpoint-{turns}")
    np.save(f"checkpoint-{turns}/state.npy", BOOKS.mean)
    BOOKS.kept.append(f"checkpoint-{turns}")
    if len(BOOKS.kept) > 2:
        shutil.rmtree(BOOKS.kept.pop(0))
    with open("latest.tmp", "wb") as file:
        pickle.dump(turns, file)
    os.replace("latest.tmp", "latest.pkl")
    os.environ["STEPS"] = os.environ.get("STEPS", "") + str(i)
    torch.set_num_threads(1 + turns % 2)

def told():
    for file in (TEXT, RAW):
        file.flush()
    books = [BOOKS.steps, BOOKS.average, BOOKS.last, BOOKS.kept, BOOKS.counts, BOOKS.mean, BOOKS.draws.random()]
    return [turns, Books.total, *books, BOOKS.rng.random(), EMA, list(QUEUE.queue), next(CYCLE), os.environ["STEPS"],
            torch.get_num_threads()]
"""
REFUSED = """
QUEUE, DONE, DATABASE = queue.Queue(), [], sqlite3.connect(":memory:")
DATABASE.execute("create table steps (number int)")
for number in range(9):
    QUEUE.put(number)

def numbers():
    number = 0
    while True:
        number += 1
        yield number

NUMBERS = numbers()

def keep_books(i):
    DONE.append(i)
    try:
        threading.Thread(target=DONE.append, args=("thread",)).start()
    except OSError:
        pass
    try:
        subprocess.run(["sh", "-c", "echo run >> processes.txt"])
    except OSError:
        pass
    try:
        DATABASE.execute("insert into steps values (1)")
    except sqlite3.DatabaseError:
        pass
    if i == 7:
        os._exit(3)
    QUEUE.get()
    next(NUMBERS)

def told():
    return [DONE, QUEUE.qsize(), DATABASE.execute("select count(*) from steps").fetchall(), next(NUMBERS)]
"""
TAIL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x, i):
        self.calls += 1
        keep_books(i)
        hidden = torch.exp(self.norm(self.layer(x)) * 0.1)
        if i == 2 and FAILS == "inplace":
            hidden.add_(1)
        return hidden.mean(-1)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

@atexit.register
def tell():
    print(*told(), model.calls, model.state_dict(), optimizer.state_dict(), flush=True)
    print(torch.rand(1), random.random(), np.random.rand(), flush=True)

def loss_of(x, i):
    weight = x[:, 0].abs() * (i != 2 or FAILS != "nan")
    return (model(x, i) * weight).sum() / weight.sum()

for i in range(5):
    optimizer.zero_grad()
    loss = loss_of(torch.ones(6, 4) + torch.arange(24.0).reshape(6, 4), i)
    loss.backward()
    for weight in model.parameters():
        weight.grad.nan_to_num_()
    optimizer.step()
"""


def run_twice(folder: Path, books: str, fails: str) -> Finished:
    """Run a script with and without a look at its failure, and compare all that it leaves behind."""
    source = f"{HEAD}FAILS = {fails!r}\n{books}{TAIL}"
    look = "observe.nonfinite" if fails == "nan" else "observe.exception"
    finished = []
    for name, fault in (("plain", {"TORCHMEDIC_INJECT_FAULT": look}), ("replayed", {})):
        (folder / name).mkdir()
        finished.append(run_script(folder / name, source, **fault))
    plain, replayed = finished
    assert replayed.stdout == plain.stdout
    assert replayed.returncode == plain.returncode == (fails == "inplace"), replayed.stderr
    assert _left_in(folder / "replayed") == _left_in(folder / "plain")
    return replayed


def _left_in(folder: Path) -> dict[str, bytes | None]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if name.split("/")[0] not in ("run", ".stdout", ".stderr")
    }


@pytest.mark.parametrize(("fails", "code"), [("nan", "TM201"), ("inplace", "TM102")])
def test_what_a_step_does_is_done_once_and_the_cause_is_proven(tmp_path: Path, fails: str, code: str) -> None:
    found = run_twice(tmp_path, MUTED, fails).only

    assert (found.code, found.grade) == (code, "proven")


@pytest.mark.parametrize("fails", ["nan", "inplace"])
def test_what_a_replay_cannot_do_without_harm_it_does_not_do(tmp_path: Path, fails: str) -> None:
    assert run_twice(tmp_path, REFUSED, fails).report.diagnoses
