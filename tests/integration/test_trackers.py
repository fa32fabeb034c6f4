"""Experiment trackers that a script uses get the diagnosis; the real packages, as far as they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    x = torch.randn(8, 4)
    if step == 4:
        x[3] = 0
    loss = (model(x) / x.norm(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    log(loss.item(), step)
"""

TENSORBOARD = """
from torch.utils.tensorboard import SummaryWriter

closed = SummaryWriter("closed")
closed.close()
writer = SummaryWriter("logs")
log = lambda loss, step: writer.add_scalar("loss", loss, step)
"""

WANDB = """
import wandb

run = wandb.init(mode="offline", project="test")
log = lambda loss, step: run.log({"loss": loss})
"""

MLFLOW = """
import mlflow

mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.start_run()
log = lambda loss, step: mlflow.log_metric("loss", loss, step=step)
"""


def test_tensorboard_has_a_text_and_a_marker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = run_script(tmp_path, TENSORBOARD + TRAIN)

    assert finished.only.code == "TM201", finished.stderr
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("torchmedic")] == [(4, 1.0)]
    (text,) = events.Tensors("torchmedic/TM201/text_summary")
    assert text.step == 4
    assert "division by zero" in text.tensor_proto.string_val[0].decode()
    assert len(list((tmp_path / "closed").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "source", "end", "said"),
    [
        ("wandb", WANDB, "print(sorted(dict(run.summary)))", "'torchmedic', 'torchmedic/TM201'"),
        ("mlflow", MLFLOW, "print(mlflow.get_run(mlflow.active_run().info.run_id).data)", "'torchmedic': 'TM201'"),
    ],
)
def test_other_trackers_have_it_too(tmp_path: Path, package: str, source: str, end: str, said: str) -> None:
    pytest.importorskip(package)
    finished = run_script(tmp_path, source + TRAIN + end, WANDB_SILENT="true")

    assert finished.only.code == "TM201", finished.stderr
    assert said in finished.stdout


def test_confidential_runs_tell_no_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = run_script(tmp_path, TENSORBOARD + TRAIN, options=["--confidential"])

    assert finished.only.code == "TM201", finished.stderr
    assert EventAccumulator(str(tmp_path / "logs")).Reload().Tags()["scalars"] == ["loss"]
