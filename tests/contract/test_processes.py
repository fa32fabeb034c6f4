"""Children of a script behave as without torchmedic: of multiprocessing, of every kind, and DataLoader workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pairs import plainly, watched

pytestmark = pytest.mark.timeout(300)  # several processes that import torch

SCRIPT = """
import multiprocessing, os, subprocess, sys
import torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index * index), torch.rand(1)


def say(queue, word):
    queue.put((word, sys.argv, sys.path[:2], __name__, dict(os.environ), sys.excepthook.__name__ == "excepthook"))


def fail(*_):
    raise ValueError("of a child")


def first_worker(number):
    print("worker", number, sorted(os.environ) == NAMES, flush=True)


NAMES = sorted(os.environ)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        if method != "forkserver":
            queue = context.Queue()
            child = context.Process(target=say, args=(queue, method))
            child.start()
            print(method, queue.get()[:5], flush=True)
            child.join()
            print(child.exitcode, flush=True)
        if method != "spawn":
            failing = context.Process(target=fail, name="failing-" + method)
            failing.start()
            failing.join()
            print(failing.exitcode, flush=True)
    torch.manual_seed(0)
    for workers in (0, 1):
        loader = DataLoader(Squares(), batch_size=4, shuffle=True, num_workers=workers, worker_init_fn=first_worker)
        for batch in loader:
            print(batch, flush=True)
    print(subprocess.run([sys.executable, "-c", "import os, sys; print(dict(os.environ), sys.path[:2])"],
                         env=dict(os.environ), capture_output=True, text=True).stdout)
    if "forkserver" in sys.argv:  # an interpreter more, as `spawn` is
        try:
            torch.multiprocessing.spawn(fail, nprocs=1)
        except Exception as error:
            print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "methods", [("fork", "spawn"), pytest.param(("fork", "spawn", "forkserver"), marks=pytest.mark.slow)]
)
def test_children_are_the_same(tmp_path: Path, methods: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    plain, other = plainly(tmp_path, "train.py", *methods), watched(tmp_path, "train.py", *methods)

    assert plain.status == 0
    assert without_pids(other.stdout) == without_pids(plain.stdout)
    said, _, warning = other.stderr.partition("\nwarning[")
    assert said == plain.stderr
    assert "`failing-fork` died of an exception" in warning  # once, although another one did too
    assert "warning[" not in warning
    assert other.status == plain.status


def without_pids(text: str) -> str:
    return re.sub(r"pid=\d+", "pid", text)
