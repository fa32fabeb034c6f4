"""The check-up of the first steps: silent mistakes are found at their line, and healthy scripts are told nothing.

The scripts are in checkup_cases/*.txt. `=== name CODE` begins one, `--- file.py` another file of the same script. The
line to blame ends in `# <- cause`. The code `none` stands for a healthy script.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import Finished, run_plain, run_script

FOLDER = Path(__file__).parent / "checkup_cases"
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ntorch.manual_seed(0)\n"


def cases(*, healthy: bool) -> list[object]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        _, *parts = re.split(r"^=== ", path.read_text(), flags=re.M)
        for part in parts:
            head, _, body = part.partition("\n")
            name, code = head.split()
            main, *others = re.split(r"^--- ", body, flags=re.M)
            files = {"train.py": HEAD + main} | {text.split("\n", 1)[0]: text.split("\n", 1)[1] for text in others}
            if (code == "none") == healthy:
                found.append(pytest.param(code, files, id=name))
    return found


def run(folder: Path, files: dict[str, str], *flags: str) -> Finished:
    for name, text in files.items():
        (folder / name).write_text(text)
    return run_script(folder, files["train.py"], *flags)


@pytest.mark.parametrize(("code", "files"), cases(healthy=False))
def test_the_mistake_is_named_at_its_line(tmp_path: Path, code: str, files: dict[str, str]) -> None:
    finished = run(tmp_path, files)

    assert finished.returncode == 0, finished.stderr
    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    place = diagnosis.cause_location
    assert place is not None
    marked = {
        (file, number)
        for file, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.endswith("# <- cause")
    }
    assert {(place.file, place.line)} == marked, finished.stderr
    assert "a fault of its own" not in finished.stderr


@pytest.mark.parametrize(("code", "files"), cases(healthy=True))
def test_a_healthy_script_is_told_nothing(tmp_path: Path, code: str, files: dict[str, str]) -> None:
    finished = run(tmp_path, files)

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == (), finished.stderr
    assert "a fault of its own" not in finished.stderr


# Everything that a step can leave behind, printed to the last bit: three shapes of graph, dropout, an attention in
# evaluation mode (which has a fast path of its own), a checkpoint, a custom function, and what torch says of itself.
TWICE = (
    HEAD
    + """
from torch.utils.checkpoint import checkpoint
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2
teacher = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
attention = nn.MultiheadAttention(8, 2, batch_first=True)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 8), nn.Sigmoid())
spare = nn.Linear(8, 8)
opt = torch.optim.AdamW([*net.parameters(), *attention.parameters(), *spare.parameters()], lr=0.01)
for step in range(30):
    x = torch.randn(4, 3, 8)
    with torch.no_grad():
        y = teacher(x)
    h, _ = attention(x, x, x)
    out = checkpoint(net, Double.apply(h).flatten(0, 1), use_reentrant=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        side = spare(h).detach().mean()
    goal = y.flatten(0, 1)
    loss = F.mse_loss(out, goal) + F.binary_cross_entropy_with_logits(out, (goal > 0).float()) + side
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item().hex(), *(p.detach().double().sum().item().hex() for p in net.parameters()))
print(torch.rand(3).tolist(), torch.is_anomaly_enabled(), "detach" in torch.Tensor.__dict__, torch.Tensor.data)
"""
)


def test_results_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    finished, plain = run_script(tmp_path, TWICE), run_plain(tmp_path, TWICE)

    assert plain.returncode == finished.returncode == 0, plain.stderr + finished.stderr
    assert finished.stdout == plain.stdout
    # The line that cuts `spare` off is told once: the term that it makes is lost (TM645), and so are its parameters.
    assert {found.code for found in finished.report.diagnoses} == {"TM633", "TM634", "TM645"}, finished.stderr


COMPILED = (
    HEAD
    + """
import torch._dynamo
from torch._dynamo.utils import counters
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(dim=1))
inner = torch.compile(model, backend="aot_eager")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = F.cross_entropy(inner(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    opt.zero_grad(); loss.backward(); opt.step()
    print(loss.item().hex(), torch.is_anomaly_enabled())
print(dict(counters["frames"]), dict(counters["graph_break"]), counters["stats"]["unique_graphs"])
"""
)


def test_compiled_code_is_looked_at_and_left_alone(tmp_path: Path) -> None:
    finished, plain = run_script(tmp_path, COMPILED), run_plain(tmp_path, COMPILED)

    assert plain.returncode == finished.returncode == 0, plain.stderr + finished.stderr
    assert finished.stdout == plain.stdout
    assert finished.only.code == "TM633"


BROADCAST = (
    HEAD
    + """
print(torch.is_anomaly_enabled())
m = nn.Linear(4, 1)
opt = torch.optim.SGD(m.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    loss = F.mse_loss(m(torch.randn(8, 4)), torch.randn(8))
    loss.backward()
    opt.step()
"""
)


def test_no_checkup_means_none(tmp_path: Path) -> None:
    finished = run_script(tmp_path, BROADCAST, options=["--no-checkup"])

    assert finished.stdout == "False\n"
    assert finished.report.diagnoses == ()


def test_a_comment_at_the_line_silences_it(tmp_path: Path) -> None:
    source = BROADCAST.replace("torch.randn(8))", "torch.randn(8))  # torchmedic: ignore[TM632]")
    assert run_script(tmp_path, source).report.diagnoses == ()


CAUGHT = (
    HEAD
    + """
import traceback
m = nn.Linear(4, 1)
try:
    m(torch.randn(2, 5))
except RuntimeError:
    traceback.print_exc()
"""
)


def test_a_traceback_of_the_first_step_is_as_it_was(tmp_path: Path) -> None:
    finished = run_script(tmp_path, CAUGHT)

    assert finished.stderr == run_plain(tmp_path, CAUGHT).stderr != ""


ANOMALY = """
import torch
from torch import nn

model = nn.Linear(4, 4)
with torch.autograd.detect_anomaly():
    model(torch.randn(2, 4)).mean().backward()
print(torch.is_anomaly_enabled())
"""


def test_the_warning_of_anomaly_mode_names_the_users_line(tmp_path: Path) -> None:
    finished, plain = run_script(tmp_path, ANOMALY), run_plain(tmp_path, ANOMALY)

    assert "train.py:6: UserWarning: Anomaly" in plain.stderr
    assert (finished.stdout, finished.stderr) == (plain.stdout, plain.stderr)
