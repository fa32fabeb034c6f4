"""`report.html` of real runs, and the formats that `run` writes while a script goes on."""

from __future__ import annotations

import json
from pathlib import Path

from hanging import KILL, run_all
from running import run_script

FAILING = """
import torch
from torch import nn

class SecretNorm(nn.Module):
    def forward(self, x):
        return x / x.std(-1, keepdim=True)

torch.manual_seed(0)
model = nn.Sequential(SecretNorm(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(4, 8)
    if step == 5:
        x[2] = 0.0
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_run_that_has_something_to_say_writes_a_page(tmp_path: Path) -> None:
    finished = run_script(tmp_path, FAILING)
    assert finished.only.code == "TM201", finished.stderr
    assert "report: run/report.html" in finished.stderr
    text = (finished.run / "report.html").read_text()
    assert "SecretNorm" not in text.partition('class="finding')[0]
    for part in ("TM201", "train.py:7", "x.std(-1, keepdim=True)", "Step time by phase", "born here", "SGD, learning"):
        assert part in text
    block = json.loads(text.partition('id="torchmedic-data">')[2].partition("</script>")[0])
    assert block["report"] == json.loads((finished.run / "report.json").read_text())
    loss, norm = block["curves"][:2]
    assert [loss["title"], norm["title"]] == ["Loss", "Gradient norm at the update"]
    assert loss["x"] == [0, 1, 2, 3, 4]  # the loss of step 5 is NaN
    assert loss["marks"] == [{"x": 5, "text": "TM201, step 5"}]


HANGING = """
import threading
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
threading.Event().wait()
"""


def test_a_run_that_hangs_and_is_killed_shows_its_last_steps(tmp_path: Path) -> None:
    finished = run_all(tmp_path, {"hang": HANGING}, *KILL)["hang"]
    assert finished.returncode == 137, finished.stderr
    text = (finished.run / "report.html").read_text()
    block = json.loads(text.partition('id="torchmedic-data">')[2].partition("</script>")[0])
    assert block["curves"][0]["x"] == list(range(20))
    assert "SGD, learning" in text


def test_cures_that_did_not_help_are_listed_with_what_happened(tmp_path: Path) -> None:
    # A constant is no cure where the right divisors are smaller than it.
    finished = run_script(tmp_path, FAILING.replace("torch.randn(4, 8)", "torch.randn(4, 8) * 1e-7"))
    assert [cure.title for cure in finished.only.treatments] == ["leave out divisors that are zero"]
    text = (finished.run / "report.html").read_text()
    assert "add a small constant to the divisor" in text
    assert "all gradients finite; results that were right have changed" in text
    assert "no success" in text


def test_a_confidential_page_holds_no_source_and_no_values(tmp_path: Path) -> None:
    finished = run_script(tmp_path, FAILING, options=["--confidential"])
    assert finished.only.code == "TM201", finished.stderr
    text = (finished.run / "report.html").read_text()
    assert "file1:7" in text
    for secret in ("SecretNorm", "x.std", "keepdim", "float32", "torch.div"):
        assert secret not in text


def test_a_healthy_run_writes_no_page(tmp_path: Path) -> None:
    finished = run_script(tmp_path, FAILING.replace("step == 5", "step == 99"))
    assert finished.report.diagnoses == ()
    assert finished.stderr == ""
    assert not (finished.run / "report.html").exists()


def test_annotations_and_a_summary_are_written_for_github(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    finished = run_script(tmp_path, FAILING, options=["--format", "github"], GITHUB_STEP_SUMMARY=str(summary))
    assert finished.stderr.startswith("::error title=TM201 division-by-zero,file=train.py,line=7,")
    assert finished.stdout == ""
    assert "TM201" in summary.read_text()


def test_sarif_is_one_document_at_the_end(tmp_path: Path) -> None:
    finished = run_script(tmp_path, FAILING, options=["--format", "sarif"])
    (result,) = json.loads(finished.stderr)["runs"][0]["results"]
    assert result["ruleId"] == "TM201"
