"""Tensors on the CPU and on a real card, each script a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_cases import Case, cases, check
from running import marked_line, torchmedic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases("device_mismatch", "cuda"))
def test_the_stray_is_named_on_the_card(tmp_path: Path, case: Case) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)

    check(case, torchmedic(tmp_path, "train.py"))


LIGHTNING = """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)

    def training_step(self, batch, number):
        x, y = batch
        soft = torch.full((x.size(0), 4), 0.05)  # <- cause
        soft.scatter_(1, y.cpu().unsqueeze(1), 0.85)
        return -(soft * self.net(x).log_softmax(-1)).sum(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(4, (16,))), batch_size=4)
lightning.Trainer(accelerator="gpu", devices=1, max_epochs=1, **quiet).fit(Task(), loader)
"""


def test_a_model_that_lightning_has_moved_away_is_put_back_for_a_replay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)

    finished = torchmedic(tmp_path, "train.py")

    assert finished.only.code == "TM310", finished.stderr
    assert finished.only.cause_location is not None
    assert finished.only.cause_location.line == marked_line(LIGHTNING), finished.stderr
    assert any(treatment.proven for treatment in finished.only.treatments), finished.stderr
