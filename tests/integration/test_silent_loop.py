"""Mistakes of the loop that raise nothing: found at their line in many shapes of loops, and nothing in healthy ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import marked_line, run_script

HERE = Path(__file__).parent
HEALTHY = sorted((HERE / "healthy_loops").glob("*.py"))
FAILING = re.split(r"^# === (TM\d+) (.+)\n", (HERE / "failing_loops.txt").read_text(), flags=re.M)[1:]
NEVER_CLEARED = """
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()  # <- cause
"""


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_healthy_loop(tmp_path: Path, path: Path) -> None:
    finished = run_script(tmp_path, path.read_text())

    assert finished.returncode == 0, finished.stderr
    notes = {"accumulation_modulo": {"TM621"}}  # shown only to those who ask
    assert {found.code for found in finished.report.diagnoses} == notes.get(path.stem, set()), finished.stderr
    assert "torchmedic" not in finished.stderr


@pytest.mark.parametrize(
    ("code", "source"),
    [
        pytest.param(code, source, id=f"{code} {name}")
        for code, name, source in zip(FAILING[::3], FAILING[1::3], FAILING[2::3], strict=True)
    ],
)
def test_the_mistake_is_found_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    finished = run_script(tmp_path, source)

    assert finished.returncode == 0, finished.stderr
    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr


def test_the_check_can_be_switched_off(tmp_path: Path) -> None:
    finished = run_script(tmp_path, NEVER_CLEARED, options=["--no-checkup"])
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.report.diagnoses == ()


def test_a_code_can_be_ignored_in_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.torchmedic]\nignore = ["TM601"]\n')
    finished = run_script(tmp_path, NEVER_CLEARED)
    assert finished.report.diagnoses == ()


@pytest.mark.parametrize(
    ("comment", "found"),
    [("torchmedic: ignore", 0), ("torchmedic: ignore[TM601]", 0), ("torchmedic: ignore[TM602]", 1)],
)
def test_a_line_can_say_that_it_is_meant(tmp_path: Path, comment: str, found: int) -> None:
    finished = run_script(tmp_path, NEVER_CLEARED.replace("<- cause", comment))
    assert len(finished.report.diagnoses) == found


def test_fail_on_counts_it(tmp_path: Path) -> None:
    finished = run_script(tmp_path, NEVER_CLEARED, options=["--fail-on", "error"])
    assert finished.returncode == 3
    assert finished.only.code == "TM601"


def test_the_patch_cures_it(tmp_path: Path) -> None:
    finished = run_script(tmp_path, NEVER_CLEARED)
    (treatment,) = finished.only.treatments
    added = [line[1:] for line in treatment.patch.splitlines() if re.match(r"\+[^+]", line)]
    lines = NEVER_CLEARED.splitlines()
    lines[marked_line(NEVER_CLEARED) : marked_line(NEVER_CLEARED)] = added
    (tmp_path / "again").mkdir()
    assert run_script(tmp_path / "again", "\n".join(lines)).report.diagnoses == ()


FRAMEWORKS = {
    "transformers": """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x=None, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"x": torch.randn(8), "labels": index % 2}


arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
    save_strategy="no", eval_strategy="epoch", use_cpu=True, disable_tqdm=True, logging_steps=100,
)
Trainer(model=Model(), args=arguments, train_dataset=Data(), eval_dataset=Data()).train()
""",
    "lightning": """
import lightning
import torch
from torch import nn


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, index):
        self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 4)), batch_size=8)


trainer = lightning.Trainer(
    max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu", accumulate_grad_batches=3,
)
trainer.fit(Lit(), loader(), loader())
""",
    "accelerate": """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loader = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for (x,) in loader:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_nothing_is_found_where_a_framework_owns_the_loop(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    finished = run_script(tmp_path, FRAMEWORKS[package])

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == (), finished.stderr
