"""Ray Train, with the real framework: on a healthy run, and on a run that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from running import Finished, clean_environment, marked_line

pytest.importorskip("ray.train")

TRAINING = """
import os

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from torchmedic.integrations.ray import watched


def loop(config):
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        h = torch.sigmoid(model(torch.randn(8, 4)))
        if config["fails"] and step == 3:
            h += 1  # <- cause
        loss = h.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [tensor.tolist() for tensor in model.parameters()]
    ray.train.report({"weights": weights, "next": torch.rand(1).item()})


def fit(loop, name, fails=False):
    trainer = TorchTrainer(
        loop, train_loop_config={"fails": fails}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.getcwd() + "/storage", name=name),
    )
    return trainer.fit().metrics


ray.init(num_cpus=3, include_dashboard=False)
assert fit(watched(loop), "healthy") == fit(loop, "plain")
print("healthy", flush=True)
fit(watched(loop), "fails", fails=True)
"""


@pytest.mark.slow  # Ray takes a minute to start three trainings
@pytest.mark.timeout(900)
def test_a_healthy_run_is_untouched_and_a_failing_one_explained_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    finished = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )

    said = finished.stdout + finished.stderr  # with the text of the workers, which Ray prints on the driver
    assert "healthy\n" in finished.stdout, said
    (healthy,) = (tmp_path / "storage/healthy/torchmedic").glob("*-ray")
    assert Finished(0, "", "", healthy).report.diagnoses == ()
    (run,) = (tmp_path / "storage/fails/torchmedic").glob("*-ray")  # one folder for both ranks
    diagnosis = Finished(finished.returncode, finished.stdout, finished.stderr, run).only
    assert diagnosis.code == "TM102"
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(TRAINING)
    assert said.count("error[TM102]") == 1, said
    assert finished.returncode == 1
    assert "RuntimeError: one of the variables" in said
    assert str(Path("torchmedic") / "integrations") not in said  # no frame of ours in the traceback
