"""The callback or tracker of each framework, with the real framework: on a healthy run, and on a run that fails."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from running import marked_line, run_plain

LIGHTNING = """
import lightning
import torch
from torch import nn

from torchmedic.integrations.lightning import TorchmedicCallback


class Lit(lightning.LightningModule):
    def __init__(self, fails):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.fails = fails

    def training_step(self, batch, index):
        (x,) = batch
        h = torch.sigmoid(self.net(x))
        if self.fails and index == 3:
            h += 1  # <- cause
        return h.square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(*callbacks, fails=False):
    torch.manual_seed(0)
    model = Lit(fails)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", callbacks=list(callbacks),
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    return [tensor.tolist() for tensor in model.parameters()] + [torch.rand(1).item()]


assert fit(TorchmedicCallback()) == fit()
print("healthy", flush=True)
import os

os.environ["TORCHMEDIC_WATCH"] = "1"
fit(fails=True)
"""

TRANSFORMERS = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from torchmedic.integrations.transformers import TorchmedicCallback


class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, classes)

    def forward(self, x=None, labels=None):
        logits = self.b(torch.relu(self.a(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}  # <- cause


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 8, generator=generator)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": torch.tensor(index % 3)}


def train(*callbacks, classes=3, report_to="none"):
    torch.manual_seed(0)
    model = Model(classes)
    arguments = TrainingArguments(
        "out", num_train_epochs=1, per_device_train_batch_size=8, report_to=report_to, save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=list(callbacks)).train()
    return [tensor.tolist() for tensor in model.parameters()] + [torch.rand(1).item()]


assert train(TorchmedicCallback()) == train()
print("healthy", flush=True)
train(classes=2, report_to="torchmedic")
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchmedic.integrations.accelerate import TorchmedicTracker


def train(log_with=None, features=4):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, log_with=log_with)
    accelerator.init_trackers("project", config={"features": features})
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(48, features)), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x,) in enumerate(loader):
        loss = model(x).square().mean()  # <- cause
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()
    return [tensor.tolist() for tensor in model.parameters()] + [torch.rand(1).item()]


assert train(TorchmedicTracker()) == train()
print("healthy", flush=True)
train("torchmedic", features=5)
"""

# `end_training` while an exception is handled. Neither a way to stop early nor an earlier failure is a finding.
ACCELERATE_HANDLED = """
import torch
from accelerate import Accelerator
from torch import nn

from torchmedic.integrations.accelerate import TorchmedicTracker


class Enough(Exception):
    pass


def train(features=4, stops=False):
    accelerator = Accelerator(cpu=True, log_with=TorchmedicTracker())
    accelerator.init_trackers("project")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randn(48, features), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        for x in loader:
            loss = model(x).square().mean()  # <- cause
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if stops:
                raise Enough
    except Enough:
        accelerator.end_training()
    finally:
        accelerator.end_training()


train(stops=True)
try:
    torch.ones(2) + torch.ones(3)
except RuntimeError:
    train()
print("healthy", flush=True)
train(features=5)
"""


def _declare_entry_points(folder: Path) -> None:
    """Make the entry points of this checkout known in a folder, whatever is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    made = folder / "torchmedic_here-0.1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: torchmedic-here\nVersion: 0.1\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (made / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("package", "source", "code", "error"),
    [
        ("lightning", LIGHTNING, "TM102", "RuntimeError: one of the variables"),
        ("transformers", TRANSFORMERS, "TM301", "IndexError: Target 2 is out of bounds."),
        ("accelerate", ACCELERATE, "TM151", "RuntimeError: mat1 and mat2"),
        ("accelerate", ACCELERATE_HANDLED, "TM151", "RuntimeError: mat1 and mat2"),
    ],
)
def test_a_healthy_run_is_untouched_and_a_failing_one_explained(
    tmp_path: Path, package: str, source: str, code: str, error: str
) -> None:
    pytest.importorskip(package)
    _declare_entry_points(tmp_path)
    finished = run_plain(tmp_path, source)

    assert finished.returncode == 1, finished.stderr
    assert "healthy" in finished.stdout, finished.stderr
    diagnosis = finished.only
    assert (diagnosis.code, finished.stderr.count(f"error[{code}]")) == (code, 1), finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert error in finished.stderr
    assert str(Path("torchmedic") / "integrations") not in finished.stderr  # no frame of ours in the traceback
