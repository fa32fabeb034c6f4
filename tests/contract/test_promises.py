"""Nothing is sent anywhere, the parent never imports torch, and what is the user's stays the user's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pairs import plainly, watched

from torchmedic.runfolder import black_box

pytestmark = pytest.mark.timeout(300)  # several processes that import torch

# Runs in every Python of the test, the parent included: notes who would have talked to whom, and who had torch.
SPY = """
import atexit, os, sys
def note(word):
    with open(os.environ["SPY_NOTES"], "a") as file:
        file.write(word + "\\n")
def audit(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto") and isinstance(args[1], tuple):
        note(f"{event} {args[1]}")
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        note(event)
sys.addaudithook(audit)
if "torchmedic" in sys.orig_argv:
    atexit.register(lambda: note(f"parent: torch {'torch' in sys.modules}, numpy {'numpy' in sys.modules}"))
"""

SCRIPT = """
import copy, io, multiprocessing, os, pickle, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def saving():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    for x, in loader:
        train(model, optimizer, x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for data in (buffer.getvalue(), pickle.dumps(optimizer), pickle.dumps(copy.deepcopy(model)), pickle.dumps(loader)):
        print("ours inside:", b"torchmedic" in data, flush=True)
    print(len(model._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks), sorted(vars(model)), flush=True)


def in_child():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, torch.randn(2, 4))  # only the child comes here


def forking():
    child = multiprocessing.get_context("fork").Process(target=in_child)
    child.start()
    child.join()
    print("child", child.exitcode, flush=True)


saving()
forking()
if "fail" in sys.argv:
    Net()(torch.randn(2, 5))
"""


def test_save_fork_and_silence(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SPY)
    (tmp_path / "train.py").write_text(SCRIPT)
    notes = tmp_path / "notes"
    spied = {"PYTHONPATH": str(tmp_path / "site"), "SPY_NOTES": str(notes)}

    plain = plainly(tmp_path, "train.py", **spied)
    other = watched(tmp_path, "train.py", "fail", **spied)

    assert plain.status == 0, plain.stderr
    assert other.stdout == plain.stdout
    assert "ours inside: True" not in other.stdout
    # A failing run was diagnosed, and still nobody was talked to.
    assert "[TM151]" in other.stderr
    assert notes.read_text().splitlines() == ["parent: torch False, numpy False"]
    # The child that was forked and trained has a box of its own.
    boxes = {path.parent.name: black_box.read(path) for path in (tmp_path / "run").glob("rank0*/blackbox")}
    pids = {box.pid for box in boxes.values()}
    assert len(boxes) == len(pids) == 2
    assert [sum(moment.phase == "backward" for moment in box.moments) for _, box in sorted(boxes.items())] == [2, 1]


def test_an_import_brings_few_names_and_no_torch() -> None:
    code = "import sys, torchmedic; print(sorted(n for n in dir(torchmedic) if n[0] != '_'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['Diagnosis', 'Location', 'Outcome', 'Report', 'Treatment', 'diagnose', 'records'] False\n"
