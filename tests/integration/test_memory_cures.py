"""What is said to cure an out-of-memory does: the script passes with it, and with less of it would not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from running import Finished, run_script

from torchmedic.records import Treatment

# A card with so many MiB, as the `meta` device: shapes and bytes, no values. It counts what is alive and refuses in the
# words of CUDA. `hidden` is what it takes for itself at every operation, which no replay can see.
CARD = """
import sys
import torch
from torch import nn
import torch.nn.functional as F
import torch.utils.checkpoint
import torchmedic.evidence.memory.cures.predicted
torchmedic.evidence.memory.cures.predicted.SECONDS = 60.0  # however slow the machine is
torch.manual_seed(0)
exec(compile('''
import weakref
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
class Card(TorchDispatchMode):
    def __init__(self, capacity, hidden=0):
        super().__init__()
        self.capacity, self.hidden, self.now, self.alive = capacity, hidden, 0, {}
    def take(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" or id(storage) in self.alive:
            return
        size = storage.nbytes()
        if self.now + size + self.hidden > self.capacity:
            asked, all, used = (each / 2**20 for each in (size, self.capacity, self.now))
            raise torch.OutOfMemoryError(
                f"META out of memory. Tried to allocate {asked:.2f} MiB. GPU 0 has a total capacity of {all:.2f} MiB "
                f"of which {all - used:.2f} MiB is free. Of the allocated memory {used:.2f} MiB is allocated by "
                f"PyTorch, and 0 bytes is reserved by PyTorch but unallocated.")
        def died(_, key=id(storage)):
            self.now -= size
            self.alive.pop(key, None)
        self.alive[id(storage)] = weakref.ref(storage, died)
        self.now += size
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.take(each)
        return result
''', "<card>", "exec"))
BATCH = int(sys.argv[2])
card = Card(int(sys.argv[1]) * 2**20, int(sys.argv[3]) * 2**20 if len(sys.argv) > 3 else 0)
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 256), nn.Linear(256, 10)
        self.blocks = nn.ModuleList(Block(256) for _ in range(3))
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

LOOP = (
    CARD
    + """
with card:
    model = Net().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(2 * BATCH, 64), torch.randint(0, 10, (2 * BATCH,)))
    for x, y in torch.utils.data.DataLoader(data, batch_size=BATCH):
        x, y = x.to("meta"), y.to("meta")
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)

TRAINER = (
    CARD
    + """
class Trainer:
    def __init__(self, model):
        self.model = model.to("meta")
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    def training_step(self, batch):
        out = self.model(batch["x"].to("meta"))
        return F.cross_entropy(out, batch["y"].to("meta"))
    def fit(self, loader):
        for number, batch in enumerate(loader):
            loss = self.training_step(batch) / 2
            loss.backward()
            if number % 2 == 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
rows = [{"x": torch.randn(64), "y": 1} for _ in range(2 * BATCH)]
with card:
    Trainer(Net()).fit(torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True))
"""
)

DRAWN = (
    CARD
    + """
def train(model, optimizer):
    for step in range(2):
        x = torch.randn(BATCH, 64, device="meta")
        target = torch.randint(0, 10, (BATCH,), device="meta")
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
with card:
    model = Net().to("meta")
    train(model, torch.optim.Adam(model.parameters()))
"""
)


def cures(finished: Finished) -> list[Treatment]:
    return [each for each in finished.only.treatments if each.result]


def passes(source: str, mib: int, batch: int) -> bool:
    """Whether a script of these, which computes nothing, runs on such a card; here, as nobody need watch it."""
    before, sys.argv = sys.argv, ["train.py", str(mib), str(batch)]
    try:
        exec(compile(source.replace("torchmedic.evidence.memory.cures.predicted.SECONDS", "_"), "train.py", "exec"), {})
    except torch.OutOfMemoryError:
        return False
    finally:
        sys.argv = before
    return True


def said(cure: Treatment) -> tuple[float, float]:
    """Needed, and there."""
    found = re.search(r"needs (?:at most )?([\d.]+) of the ([\d.]+) [MG]iB there are", cure.result)
    assert found is not None, cure.result
    return float(found[1]), float(found[2])


@pytest.mark.parametrize(
    ("source", "mib", "fits", "fails"),
    [
        (LOOP, 190, 4000, 8000),
        pytest.param(TRAINER, 185, 4000, 8000, marks=pytest.mark.slow),
        pytest.param(DRAWN, 110, 2000, 4000, marks=pytest.mark.slow),
    ],
)
def test_what_is_predicted_to_fit_does(tmp_path: Path, source: str, mib: int, fits: int, fails: int) -> None:
    finished = run_script(tmp_path, source, str(mib), "8000")
    assert finished.only.code == "TM402", finished.stderr
    assert any("as it is needs" in fact for fact in finished.only.evidence)
    first = cures(finished)[0]
    assert first.title.startswith(f"use a batch of {fits} instead of 8000"), finished.stderr
    assert not first.proven
    assert f"[predicted, not run: {first.result[:20]}" in " ".join(finished.stderr.split())
    needed, there = said(first)
    assert needed < there == mib
    assert passes(source, mib, fits)
    assert not passes(source, mib, fails)
    if source is LOOP:
        cure = next(each for each in cures(finished) if "checkpoint every `Block`" in each.title)
        needed, _ = said(cure)
        changed = LOOP.replace("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)")
        assert passes(changed, int(needed) + 1, 8000)
        assert not passes(changed, int(0.98 * needed), 8000)


EVALUATION = (
    CARD
    + """
def evaluate(model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        out = model(x.to("meta"))
        right += len(out)
    return right
data = torch.utils.data.TensorDataset(torch.randn(2 * BATCH, 64), torch.randint(0, 10, (2 * BATCH,)))
with card:
    evaluate(Net().to("meta"), torch.utils.data.DataLoader(data, batch_size=BATCH))
"""
)


def test_an_evaluation_without_gradients_fits_as_it_was_predicted_to(tmp_path: Path) -> None:
    finished = run_script(tmp_path, EVALUATION, "200", "8000")
    assert finished.only.code == "TM405", finished.stderr
    [cure] = finished.only.treatments
    assert cure.title == "run it under `with torch.no_grad():`"
    needed, there = said(cure)
    assert needed < there == 200
    changed = EVALUATION.replace("def evaluate", "@torch.no_grad()\ndef evaluate")
    assert passes(changed, int(needed) + 1, 8000)
    assert not passes(changed, int(0.98 * needed), 8000)


def test_where_nothing_can_be_predicted_nothing_is(tmp_path: Path) -> None:
    # What the card takes for itself is more than the step: by the prediction it would have fitted.
    finished = run_script(tmp_path, LOOP, "900", "8000", "700")
    assert finished.only.code == "TM402", finished.stderr
    assert not cures(finished)
    assert finished.only.treatments
    assert not any("fake tensors the step" in fact for fact in finished.only.evidence)
    # The model alone is too large: that is said, and no batch is proposed.
    (tmp_path / "other").mkdir()
    finished = run_script(tmp_path / "other", LOOP, "20", "8000")
    assert finished.only.code == "TM402", finished.stderr
    assert not cures(finished)
    assert any(fact.startswith("with 1 of the 8000 rows it may still need") for fact in finished.only.evidence)


HOST = """
import resource
import sys
import torch
from torch import nn
import torch.nn.functional as F
import torchmedic.evidence.memory.cures.forked
import torchmedic.evidence.memory.cures.predicted
torchmedic.evidence.memory.cures.predicted.SECONDS = 60.0
torchmedic.evidence.memory.cures.forked.SECONDS = torchmedic.evidence.memory.cures.forked.LONGEST = 60.0
BATCH = int(sys.argv[1])
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(256)), nn.SiLU()
    def forward(self, x):
        for _ in range(3):
            x = self.act(x * self.scale)
        return x
model = nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def limit(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, -1))
"""

STEPS = """
limit(int(sys.argv[2]))
for step in range(2):
    x = torch.randn(BATCH, 256)
    y = torch.randn(BATCH, 256)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    print("step", step)
    loss.backward()
    optimizer.step()
"""


def test_on_the_host_cures_are_run_for_real_in_a_copy_of_the_process(tmp_path: Path) -> None:
    finished = run_script(tmp_path, HOST + STEPS, "40000", "560")
    assert finished.only.code == "TM414", finished.stderr
    smaller, checkpointed = (each for each in finished.only.treatments if each.proven)
    found = re.search(r"use a batch of (\d+) instead of 40000", smaller.title)
    assert found is not None
    assert "checkpoint every `Block`" in checkpointed.title
    for cure in (smaller, checkpointed):
        assert re.fullmatch(r"loss [\d.]+, all gradients finite", cure.result)
    assert finished.stdout.count("step") == 0, "what is tried says nothing"
    (tmp_path / "again").mkdir()
    assert run_script(tmp_path / "again", HOST + STEPS, found[1], "560").returncode == 0


def test_a_step_that_passes_is_no_proof_if_the_first_update_does_not(tmp_path: Path) -> None:
    """Of 200 MiB, the step of one row takes some; then come the two averages of Adam, and do not fit."""
    source = HOST + "model.append(nn.Linear(256, 60000))\n"
    source += "optimizer = torch.optim.Adam(model.parameters())\n"
    source += STEPS.replace("F.mse_loss(model(x), y)", "model(x).logsumexp(1).mean()")
    finished = run_script(tmp_path, source, "400", "200")
    assert finished.only.code == "TM414", finished.stderr
    assert not any(each.proven for each in finished.only.treatments), finished.only.treatments
    assert any(fact.startswith("tried: with ") for fact in finished.only.evidence)


def test_an_evaluation_is_run_without_gradients(tmp_path: Path) -> None:
    source = (
        HOST
        + """
def evaluate(loader):
    model.eval()
    wrong = 0.0
    for x, y in loader:
        wrong += F.mse_loss(model(x), y).item()
        print("seen")
    return wrong
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(BATCH, 256), torch.randn(BATCH, 256)), batch_size=BATCH)
limit(int(sys.argv[2]))
evaluate(loader)
"""
    )
    finished = run_script(tmp_path, source, "40000", "300")
    assert finished.only.code == "TM405", finished.stderr
    [cure] = (each for each in finished.only.treatments if each.proven)
    assert (cure.title, cure.result) == ("run it under `with torch.no_grad():`", "it ran to its end")
    assert "seen" not in finished.stdout
    (tmp_path / "again").mkdir()
    cured = source.replace("def evaluate", "@torch.no_grad()\ndef evaluate")
    assert run_script(tmp_path / "again", cured, "40000", "300").returncode == 0


def test_the_step_passes_once_the_graphs_of_earlier_ones_are_let_go(tmp_path: Path) -> None:
    source = HOST + STEPS.replace("limit(", "spreads = []\nlimit(").replace("range(2)", "range(8)")
    kept = source.replace("    loss.backward()", "    spreads.append(model(x).std())\n    loss.backward()")
    finished = run_script(tmp_path, kept, "10000", "700")
    assert finished.only.code == "TM403", finished.stderr
    [cure] = finished.only.treatments
    assert cure.proven, finished.stderr
    assert cure.title.startswith("keep ")
    assert cure.result.endswith("all gradients finite")
    (tmp_path / "again").mkdir()
    assert run_script(tmp_path / "again", kept.replace(".std()", ".std().item()"), "10000", "700").returncode == 0


@pytest.mark.parametrize("loss", ["(out - y).abs().mean()", pytest.param("F.l1_loss(out, y)", marks=pytest.mark.slow)])
def test_a_column_is_made_a_row_in_the_users_own_line(tmp_path: Path, loss: str) -> None:
    source = (
        HOST
        + f"""
def criterion(out, y):
    return {loss}
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(BATCH, 8), torch.randn(BATCH)
limit(400)
for step in range(2):
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
"""
    )
    finished = run_script(tmp_path, source, "20000")
    assert finished.only.code == "TM404", finished.stderr
    [cure] = finished.only.treatments
    assert cure.proven, finished.stderr
    assert f"+    return {loss.replace('out', 'out.squeeze(-1)')}" in cure.patch
    (tmp_path / "again").mkdir()
    cured = source.replace(loss, loss.replace("out", "out.squeeze(-1)"))
    assert run_script(tmp_path / "again", cured, "20000").returncode == 0


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGSEGV)",
        pytest.param("os._exit(3)", marks=pytest.mark.slow),
        pytest.param("1 / 0", marks=pytest.mark.slow),
    ],
)
def test_what_becomes_of_a_copy_is_nobodys_business(tmp_path: Path, end: str) -> None:
    source = HOST.replace("import resource", "import os\nimport signal\nimport resource")
    source += f"torchmedic.evidence.memory.cures.real_step.RealStep.take = lambda *args: {end}\n"
    finished = run_script(tmp_path, source + STEPS, "40000", "560")
    assert finished.returncode == 1
    assert finished.only.code == "TM414", finished.stderr
    assert finished.only.treatments
    assert not any(each.proven for each in finished.only.treatments)
    assert "a fault of its own" not in finished.stderr
