"""`torchmedic fit` on whole scripts, on a machine without a card: what they hold, what fits, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import clean_environment

from torchmedic.cli import main
from torchmedic.fit.fake_device import why_not
from torchmedic.records.fit import Edit, Line, Need, Plan, Prediction
from torchmedic.report import fit as show

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PLAIN = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(100, 2000), nn.ReLU(), nn.Linear(2000, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    x, y = torch.randn(64, 100).to(device), torch.randint(0, 10, (64,), device=device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss, loss.item(), f"{loss:.3f}", loss.detach().cpu().numpy())
"""

TRAINER = """
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, args):
        self.device = torch.device("cuda:0")
        head = nn.Linear(32 * 30 * 30, 10)
        self.model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), head)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)  # before the model moves
        self.model.to(self.device)
        data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(0, 10, (2000,)))
        self.loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=4, pin_memory=True)
        self.loss = nn.CrossEntropyLoss()

    def train(self):
        for x, y in self.loader:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            self.optimizer.zero_grad()
            out = self.model(x)
            loss = self.loss(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            correct = (out.argmax(1) == y).sum().item()
            assert not torch.isnan(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    Trainer(parser.parse_args()).train()
"""

AMP = """
import torch
from torch import nn

layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.1)
model = nn.TransformerEncoder(layer, 3).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(100):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(16, 64, 128, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

LSTM = """
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(1000, 64), nn.Linear(128, 1000)
        self.rnn = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0]).flatten(0, 1)


model = Tagger().cuda()
optimizer = torch.optim.AdamW(model.parameters())
BATCH = 32
for _ in range(100):
    x, y = torch.randint(0, 1000, (BATCH, 20)).cuda(), torch.randint(0, 1000, (BATCH * 20,)).cuda()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

HOST = PLAIN.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cpu"')

# Weights tied before the model moves, a deep copy, values that decide about shapes, two optimizers.
TRAPS = """
import copy

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.words(x))


model = Net()
model.cuda()
average = copy.deepcopy(model).requires_grad_(False)
model = torch.compile(model)
critic = nn.Linear(500, 1).cuda()
first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
for _ in range(100):
    x = torch.randint(0, 500, (8, 10)).cuda()
    out = model(x)
    mask = x > 3
    if mask.any() and not mask.all():
        pass
    loss = nn.functional.cross_entropy(out[mask], x[mask]) + critic(out).mean()
    rows = torch.nonzero(mask)
    loss.backward()
    first.step()
    second.step()
    torch.save(model.state_dict(), "weights.pt")
    values = out.tolist()[0][0][0] + len(rows) + out.detach().cpu().numpy().sum()
"""

CODEBOOK = """
import torch
from torch import nn


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(64, 32))

    def forward(self, x):
        return x + (self.codes[torch.cdist(x, self.codes).argmin(1)] - x).detach()


model = nn.Sequential(nn.Linear(16, 32), Codebook(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    scores = model(torch.randn(10 * 4, 16)).view(10, 4, 8).log_softmax(-1)
    labels, times, lengths = torch.randint(1, 8, (4, 3)), torch.full((4,), 10), torch.full((4,), 3)
    loss = nn.functional.ctc_loss(scores, labels, times, lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

NO_STEP = "import torch\nprint(torch.zeros(3).cuda().sum())\n"
BROKEN = "import torch\nmodel = torch.nn.Linear(3, 4).cuda()\nmodel(torch.zeros(2, 5).cuda())\n"

PACKED = LSTM.replace("self.words(x))[0]", "packed(self.words(x), LENGTHS, True, False))[0].data").replace(
    "y).backward()", "y[: LENGTHS.sum()]).backward()"
)
PACKED = PACKED.replace(
    "BATCH = 32", "BATCH, LENGTHS, packed = 32, torch.tensor([20, 5, 12, 3] * 8), nn.utils.rnn.pack_padded_sequence"
).replace(".flatten(0, 1)", "")

SCRIPTS = {
    "plain": PLAIN,
    "trainer": TRAINER,
    "amp": AMP,
    "lstm": LSTM,
    "packed": PACKED,
    "host": HOST,
    "traps": TRAPS,
    "codebook": CODEBOOK,
    "no_step": NO_STEP,
    "broken": BROKEN,
}

FOLLOW = """
import json
import sys
import warnings
from pathlib import Path

from torchmedic.fit.analysis import need_of, peak_of
from torchmedic.fit.cards import find_card
from torchmedic.fit.changes import Change
from torchmedic.fit.trials import Trials
from torchmedic.records.fit import KINDS

warnings.simplefilter("ignore")
found = {}
card = find_card("H200")
for path in sys.argv[1:]:
    trace = Trials(Path(path), (), card, 100).run(Change())
    need = need_of(trace, card)
    totals = {}
    for row in peak_of(trace, need).rows:
        kind = row.kind.partition(",")[0] if "lines" in row.kind else row.kind
        totals[kind] = totals.get(kind, 0) + row.nbytes
    alive = {}
    for size, kind in zip(trace.sizes, trace.kinds):
        alive[KINDS[kind]] = alive.get(KINDS[kind], 0) + size
    found[Path(path).stem] = {"rows": totals, "made": alive, "error": trace.error, "steps": trace.steps,
        "need": need.total, "notes": trace.notes, "batch": trace.batch, "half": trace.autocast}
print(json.dumps(found))
"""


def follow(folder: Path, scripts: dict[str, str]) -> dict[str, Any]:
    """Run scripts on a pretended card, all from one process that imports torch once."""
    for name, source in scripts.items():
        (folder / f"{name}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW, *(str(folder / f"{name}.py") for name in scripts)],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return follow(tmp_path_factory.mktemp("fit"), SCRIPTS)


def weights(*counts: int) -> int:
    return 4 * sum(counts)


MLP = weights(100 * 2000, 2000, 2000 * 10, 10)


@pytest.mark.parametrize("name", ["plain", "host"])
def test_a_plain_loop_to_the_byte(followed: dict[str, Any], name: str) -> None:
    found = followed[name]
    assert (found["error"], found["steps"]) == ("", 2)
    rows = found["rows"]
    assert rows["parameters"] == MLP
    assert rows["optimizer state"] == 2 * MLP
    assert rows["gradients"] == MLP
    assert sum(rows.values()) == found["need"]


def test_a_trainer_with_a_loader_and_an_optimizer_from_before_the_move(followed: dict[str, Any]) -> None:
    found = followed["trainer"]
    assert (found["error"], found["steps"]) == ("", 2)
    parameters = weights(32 * 3 * 9, 32, 32, 32, 32 * 30 * 30 * 10, 10)
    assert found["rows"]["parameters"] == parameters
    assert found["made"]["optimizer state"] == parameters  # momentum of the parameters on the card
    assert found["batch"] == [[128, 3, 32, 32], [128]]


def test_mixed_precision_with_a_scaler_and_a_fused_optimizer(followed: dict[str, Any]) -> None:
    found = followed["amp"]
    assert (found["error"], found["steps"], found["half"]) == ("", 2, True)
    layer = weights(3 * 128 * 128, 3 * 128, 128 * 128, 128, 128 * 512, 512, 512 * 128, 128, 4 * 128)
    assert found["rows"]["parameters"] == 3 * layer
    assert found["made"]["optimizer state"] == 2 * 3 * layer + 3 * 12 * 4  # and a count of steps per parameter


def test_a_recurrent_layer(followed: dict[str, Any]) -> None:
    found = followed["lstm"]
    assert (found["error"], found["steps"]) == ("", 2)
    recurrent = weights(4 * 128 * 64, 4 * 128 * 128, 8 * 128, 4 * 128 * 128, 4 * 128 * 128, 8 * 128)
    assert found["made"]["parameters"] == recurrent + weights(1000 * 64, 128 * 1000, 1000)
    assert found["rows"]["activations"] >= 32 * 20 * 128 * 11 * 4  # the reserve of cuDNN


def test_sequences_without_their_padding(followed: dict[str, Any]) -> None:
    found, padded = followed["packed"], followed["lstm"]
    assert (found["error"], found["steps"]) == ("", 2)
    assert found["made"]["parameters"] == padded["made"]["parameters"]
    assert found["made"]["activations"] < 0.75 * padded["made"]["activations"]  # half of each batch is padding


def test_traps_of_fake_tensors(followed: dict[str, Any], tmp_path: Path) -> None:
    found = followed["traps"]
    assert (found["error"], found["steps"]) == ("", 4)
    assert found["rows"]["parameters"] == 2 * weights(500 * 64) + weights(500, 1)  # tied weights count once
    assert any("upper bound" in note for note in found["notes"])


def test_buffers_of_a_script_without_a_device_and_a_loss_of_sequences(followed: dict[str, Any]) -> None:
    found = followed["codebook"]
    assert (found["error"], found["steps"]) == ("", 2)
    assert found["rows"]["buffers"] == weights(64 * 32)


def test_why_a_script_cannot_be_followed(followed: dict[str, Any]) -> None:
    assert followed["no_step"]["error"] == "there is no training step: no optimizer of torch.optim stepped"
    assert followed["broken"]["error"].startswith("RuntimeError at ")
    assert "broken.py:3: " in followed["broken"]["error"]


@pytest.mark.slow
def test_a_transformer_of_hugging_face_from_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    ids = torch.randint(0, 1000, (8, 64)).cuda()
    loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
    found = follow(tmp_path, {"gpt": source})["gpt"]
    assert (found["error"], found["steps"]) == ("", 2)
    block = weights(64 * 192, 192, 64 * 64, 64, 64 * 256, 256, 256 * 64, 64, 4 * 64)
    assert found["rows"]["parameters"] == 2 * block + weights(1000 * 64, 1024 * 64, 2 * 64)


@pytest.mark.slow
def test_a_network_of_torchvision(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    source = """
import torch
import torchvision

model = torchvision.models.resnet18().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(100):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(8, 3, 64, 64).cuda()), torch.zeros(8).long().cuda()).backward()
    optimizer.step()
"""
    found = follow(tmp_path, {"vision": source})["vision"]
    assert (found["error"], found["steps"]) == ("", 2)
    assert found["rows"]["parameters"] == 11689512 * 4


@pytest.mark.slow
@pytest.mark.parametrize("size", ["gpt2-124m", "gpt2-350m"])
def test_what_was_measured_on_a_card(tmp_path: Path, size: str) -> None:
    """Parameters, state and saved activations of GPT-2 as an out-of-memory on an H200 found them (oom-h200.json)."""
    source = f"""
import sys

import torch

sys.path.insert(0, {str(BENCHMARKS)!r})
import gpt

model = gpt.GPTLoss({size!r}, 1024, "cuda").to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    tokens = torch.randint(0, gpt.VOCABULARY, (8, 1025), device="cuda")
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()
"""
    found = follow(tmp_path, {"gpt": source})["gpt"]["rows"]
    measured = next(
        row["rows"] for row in json.loads((RESULTS / "oom-h200.json").read_text())["rows"] if row["size"] == size
    )
    assert found["parameters"] == measured["parameters"]
    assert found["optimizer state"] == measured["optimizer state"]
    assert found["activations"] == pytest.approx(measured["saved activations"], rel=1e-4)
    assert found["workspaces of cuBLAS"] == pytest.approx(measured["workspaces of cuBLAS"], rel=0.02)


BLOCKS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


batch_size = 2048
model = nn.Sequential(*(Block() for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10):
    loss = model(torch.randn(batch_size, 256, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_whole_answer_for_a_step_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(BLOCKS)
    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "fit", "train.py", "--memory", "1000MiB", "--format", "json"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False
    batch = found["batch"]
    assert batch["current"] == 2048
    assert (batch["line"]["line"], batch["need"]["fits"]) == (15, True)
    assert 500 < batch["size"] < 2048
    plans = {plan["title"]: plan for plan in found["plans"]}
    checkpoint = plans["checkpoint each Block"]
    assert checkpoint["need"]["fits"] is True
    assert checkpoint["seconds"] > found["seconds"]  # it computes more
    assert plans["keep activations on the host"]["seconds"] > 2 * found["seconds"]
    best = found["plans"][0]
    assert best["need"]["fits"] is True
    monkeypatch.chdir(tmp_path)
    prediction = show_of(found)
    assert "checkpoint" in show.diff(prediction) or "micro-batches" in show.diff(prediction)


def show_of(found: dict[str, Any]) -> Prediction:
    import msgspec

    return msgspec.convert({key: value for key, value in found.items() if key != "fits"}, Prediction)


def test_errors_of_the_command_line_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    for arguments, text in (
        ([str(tmp_path / "missing.py")], "cannot find the script"),
        ([str(tmp_path)], "it is not a script"),
        ([str(script), "--memory", "much"], "not a size"),
        ([str(script), "--device-name", "GTX 970"], "no such card"),
    ):
        assert main(["fit", *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert text in said.err
        assert said.err.count("\n") == 1


def test_the_plan_as_a_diff(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\noptimizer = torch.optim.Adam(model.parameters())\n")
    need = Need(allocated=1, reserved=1, context=1, fits=True)
    plan = Plan(
        title="Adam with fused=True",
        need=need,
        seconds=1.0,
        edits=(Edit(Line(str(script), 2), "optimizer = torch.optim.Adam(model.parameters(), fused=True)"),),
    )
    tight = Need(allocated=1, reserved=1, context=1, fits=False)
    found = Prediction(
        card="H200", memory=1, need=tight, phase="forward", line=plan.edits[0].line, rows=(), seconds=1.0, plans=(plan,)
    )
    text = show.diff(found)
    assert "-optimizer = torch.optim.Adam(model.parameters())\n" in text
    assert "+optimizer = torch.optim.Adam(model.parameters(), fused=True)\n" in text
    assert script.read_text().endswith("parameters())\n")  # nothing was written
