"""`torchmedic repro` hands over a script that fails as the run did, or says in one line why there is none."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from running import Finished, clean_environment, run_script

from torchmedic.cli import main
from torchmedic.repro import check, worker

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
"""

LOOP = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        h = self.fc(x)
        return {body}

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 8)
    y = torch.randint(0, 4, (16,))
    out = model(x)
    loss = {loss}
    {then}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)


def training(body: str, loss: str = "out.mean()", then: str = "") -> str:
    return LOOP.format(body=body, loss=loss, then=then)


# What fails, and a line that its script must hold.
FAILURES = {
    "division by zero": (training("h / (h - h)"), "torch.div(x, y)"),
    "log of a negative": (training("torch.log(h)"), "torch.log(x)"),
    "gradient of sqrt at zero": (training("torch.sqrt(h * 0)"), "result.sum().backward()"),
    "gradient behind where": (
        training("torch.where(h > 0, torch.sqrt(h * (h > 0)), h)"),
        "result.backward(incoming)",
    ),
    "exp": (training("torch.exp(h * 1000)"), "torch.exp(x)"),
    "float16": (training("(h * 1e6).half().float()"), "x.to(torch.float16)"),
    "masked row": (
        training("torch.softmax(h.masked_fill((torch.arange(16) == 3)[:, None], -torch.inf), -1)"),
        "torch.softmax(x, dim=",
    ),
    "all labels ignored": (
        training("h", "F.cross_entropy(out, torch.full_like(y, -100))"),
        "torch.nn.functional.nll_loss(",
    ),
    "empty mean": (training("h[h > 100].mean()"), "torch.mean(x)"),
    "one element": (training("h[:1].std(0)"), "torch.std(x"),
    "label": (training("h", "F.cross_entropy(out, y + 1)"), "torch.nn.functional.cross_entropy(out, "),
    "embedding": (
        HEAD + "nn.Embedding(10, 3)(torch.tensor([[1, 10], [2, 3]])).sum().backward()\n",
        "torch.nn.functional.embedding(",
    ),
    "matrix product": (training("h @ torch.randn(8, 4)"), "h @ x"),
    "layer of the wrong width": (training("self.fc(h)"), "torch.nn.functional.linear("),
    "dtype": (training("self.fc(x.double())"), "dtype=torch.float64"),
    "in place on a result": (training("torch.sigmoid(h)", then="out[0] = 0"), "torch.sigmoid(x)"),
    "in place on an argument": (training("h", "(out * out).mean()", "out.mul_(2)"), "x.mul_(2)"),
    "step before backward": (
        HEAD
        + """
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 8)
first, second = model(x).mean(), model(x).square().mean()
first.backward()
optimizer.step()
second.backward()
""",
        "with torch.no_grad():",
    ),
    "graph cut": (training("h.argmax(1)", "out.float().mean()"), "x.argmax(1)"),
    "not a scalar": (training("h", "out"), ".backward()"),
    "concatenation": (training("torch.cat([h, x[:8], h, h], 0)"), "torch.cat([x, y]"),
    "view": (training("h.t().view(-1)"), ".view(-1)"),
    "recurrent layer": (
        HEAD + "nn.LSTM(8, 16, batch_first=True)(torch.randn(4, 5, 9))[0].sum().backward()\n",
        "torch.nn.LSTM(8, 16, batch_first=True)",
    ),
    "assignment": (HEAD + "t = torch.zeros(4, 3)\nt[:, 5] = 1.0\n", "t[:, 5] = 1.0"),
    "domain": (
        training("h * 3", "F.binary_cross_entropy(out, torch.ones_like(out))"),
        "torch.nn.functional.binary_cross_entropy(",
    ),
    "unknown to every rule": (HEAD + "torch.linalg.inv(torch.zeros(3, 3))\n", "torch.linalg.inv("),
}


def scripted(finished: Finished) -> str:
    """The script of a run, which must reproduce; made and run in this process, which has torch already."""
    output = finished.run / "repro.py"
    recipes = sorted(finished.run.glob("rank*/repro-*.json"))
    assert recipes, finished.stderr
    why_not = json.loads(recipes[0].read_bytes())["why_not"]
    assert not why_not, why_not
    assert worker.main([str(recipes[0]), str(output)]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(output))  # SystemExit if it does not fail
    return output.read_text()


@pytest.mark.parametrize(("source", "line"), FAILURES.values(), ids=FAILURES)
def test_the_script_fails_as_the_run_did(tmp_path: Path, source: str, line: str) -> None:
    finished = run_script(tmp_path, source)
    text = scripted(finished)

    assert line in text, text
    assert text.count("\n") <= 40
    assert finished.only.code in text
    assert "train.py:" in text
    assert not (tmp_path / "run" / "repro.safetensors").exists()
    assert "fault" not in finished.stderr


def test_the_command_makes_the_script_checks_it_and_says_so(tmp_path: Path) -> None:
    run_script(tmp_path, FAILURES["division by zero"][0])

    done = subprocess.run(
        [sys.executable, "-m", "torchmedic", "repro", "run", "--output", "small.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote small.py (")
    assert "shrunk from [16, 4], [16, 4] to [1], [1]" in done.stdout
    assert "checked: it fails in the same way (infinity from finite inputs)" in done.stdout
    assert "torch.div(x, y)" in (tmp_path / "small.py").read_text()


NOTHING = {
    "data": (
        HEAD
        + """
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 8)
    x[3, 2] = torch.nan
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
        "the bad value was already in",
    ),
    "freed graph": (
        HEAD + "h = nn.Linear(2, 1)(torch.ones(2)).square()\nh.backward()\nh.backward()\n",
        "backward went twice through the same graph",
    ),
    "plain Python": (HEAD + 'print({"a": torch.ones(1)}["b"])\n', "no operation of torch raised it"),
    "sparse": (HEAD + "(torch.eye(4).to_sparse() @ torch.ones(3, 2))\n", "sparse"),
}


@pytest.mark.parametrize(("source", "why"), NOTHING.values(), ids=NOTHING)
def test_where_there_is_no_failing_operation_it_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, why: str
) -> None:
    finished = run_script(tmp_path, source)

    assert main(["repro", str(finished.run)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert finished.only.code in said
    assert said.count("\n") == 1
    assert not (finished.run / "repro.py").exists()


def test_a_confidential_run_keeps_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.torchmedic]\nconfidential = true\n")
    finished = run_script(tmp_path, FAILURES["division by zero"][0])

    assert list(finished.run.glob("rank*/repro*")) == []
    assert main(["repro", str(finished.run)]) == 2
    assert "--confidential" in capsys.readouterr().err


def test_a_bad_loss_that_is_never_used_leaves_nothing(tmp_path: Path) -> None:
    source = training("h", "out.mean() / (0.0 if step == 1 else 1.0)")
    source = source.replace("    optimizer.step()", "    if loss.isfinite():\n        optimizer.step()")
    finished = run_script(tmp_path, source)

    assert finished.report.diagnoses == ()
    assert list(finished.run.glob("rank*/repro*")) == []


def test_what_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["repro", *words]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "is not a run folder" in said(str(tmp_path))
    assert "is not a run folder" in said(str(tmp_path / "nowhere"))
    healthy = run_script(tmp_path, "import torch\n")
    assert "no diagnosis" in said(str(healthy.run))
    for path in healthy.run.rglob("*"):
        if path.is_file():
            path.unlink()
    for path in sorted(healthy.run.rglob("*"), reverse=True):
        path.rmdir()
    finished = run_script(tmp_path, FAILURES["division by zero"][0])
    run = str(finished.run)
    assert "it exists" in said(run, "--output", str(tmp_path / "train.py"))
    assert "ends in .py" in said(run, "--output", str(tmp_path / "small.txt"))
    assert "no such folder" in said(run, "--output", str(tmp_path / "a" / "small.py"))
    recipe = next(finished.run.glob("rank*/repro-0.json"))
    whole = recipe.read_bytes()
    recipe.write_bytes(whole[:200])
    assert "damaged" in said(run)
    recipe.unlink()
    assert "no operation was recorded" in said(run)


def test_damaged_values_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_script(tmp_path, FAILURES["division by zero"][0])
    recipe = next(finished.run.glob("rank*/repro-0.json"))
    recipe.with_suffix(".safetensors").write_bytes(b"short")

    assert worker.main([str(recipe), str(tmp_path / "small.py")]) == 2
    said = capsys.readouterr().err
    assert "damaged" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "small.py").exists()


def test_a_script_that_does_not_fail_is_handed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = run_script(tmp_path, FAILURES["division by zero"][0])
    made = check.Made(lines=3, values=None, before=[[2]], after=[[1]])
    asked = []

    def make(recipe: Path, output: Path, *, shrink: bool = True) -> check.Made:
        asked.append(shrink)
        output.write_text("raise SystemExit('not reproduced: no NaN in result')\n")
        return made

    monkeypatch.setattr(check, "make", make)
    assert main(["repro", str(finished.run)]) == 1
    assert "does NOT fail in the same way (not reproduced: no NaN in result)" in capsys.readouterr().out
    assert asked == [True, False]
