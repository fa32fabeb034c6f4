"""Hugging Face, Lightning and accelerate own the loop; the cause is still a line of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, run_script

HUGGING_FACE = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x=None, labels=None):
        p = torch.softmax(self.b(torch.relu(self.a(x))), -1)
        p = p * (x.sum(-1, keepdim=True) != 0)
        loss = -torch.log(p.gather(1, labels[:, None])).mean()  # <- cause
        return {"loss": loss, "logits": p}


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 8, generator=generator)
        self.x[37] = 0
        self.y = torch.randint(0, 2, (64,), generator=generator)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


arguments = TrainingArguments(
    "out", num_train_epochs=1, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, logging_steps=100,
)
Trainer(model=Model(), args=arguments, train_dataset=Data()).train()
"""

LIGHTNING = """
import lightning
import torch
from torch import nn


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch, index):
        (x,) = batch
        h = torch.sigmoid(self.net(x))
        h += 1  # <- cause
        loss = h.square().mean()
        self.log("loss", loss)  # raises after the teardown, which comes before the replay
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(64, 4))
trainer = lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=8))
"""

# The loss is differentiated by `manual_backward`: only a step that is cut through it can prove a cure.
MANUAL_LIGHTNING = """
import lightning
import torch
from torch import nn


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(4, 4)

    def training_step(self, batch, index):
        (x,) = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        h = self.net(x)
        loss = (h.square().mean(1) / (x.abs().sum(1))).mean()  # <- cause
        if not torch.isfinite(loss):
            raise ValueError(f"loss is {loss.item()}")
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


x = torch.randn(64, 4)
x[37] = 0
trainer = lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
trainer.fit(Lit(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8))
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(48, 4)
data[17] = 0
loader = DataLoader(TensorDataset(data), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        x = x / x.norm(dim=1, keepdim=True)  # <- cause
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


FORWARD_IN_LIGHTNING = """
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
        smooth = torch.full((len(x), 4), 0.05, dtype=torch.float64)  # <- cause
        loss = -(smooth @ self.net(x).log_softmax(-1).T).mean()
        self.log("loss", loss)
        return {"loss": loss}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(4, (16,))), batch_size=4)
lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(Task(), loader)
"""


@pytest.mark.parametrize(
    ("package", "source", "code", "item"),
    [
        ("lightning", FORWARD_IN_LIGHTNING, "TM160", ""),
        ("transformers", HUGGING_FACE, "TM202", "dataset item 37"),
        ("lightning", LIGHTNING, "TM102", ""),
        pytest.param("lightning", MANUAL_LIGHTNING, "TM201", "dataset item 37", marks=pytest.mark.slow),
        ("accelerate", ACCELERATE, "TM201", "dataset item 17"),
    ],
    ids=["forward in lightning", "hugging face", "lightning", "lightning with manual optimization", "accelerate"],
)
def test_the_cause_is_the_users_own_line(tmp_path: Path, package: str, source: str, code: str, item: str) -> None:
    pytest.importorskip(package)
    finished = run_script(tmp_path, source)

    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr
    assert item in " ".join(place.label for place in diagnosis.locations), finished.stderr
    assert any(treatment.proven for treatment in diagnosis.treatments), finished.stderr


LEFT_IN_EVALUATION = """
import lightning
import torch
from torch import nn


class Look(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == 6:
            module.eval()  # <- cause
            with torch.no_grad():
                module(torch.zeros(4, 4))


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


trainer = lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu", callbacks=[Look()],
)
data = torch.utils.data.TensorDataset(torch.randn(256, 4))
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=8))
"""

# Lightning clears all gradients itself when training begins. The line of `fit` is not to blame for the rest.
NOT_CLEARED = """
import lightning
import torch
from torch import nn


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def training_step(self, batch, index):
        encoders, decoders = self.optimizers()
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        encoders.zero_grad()
        self.manual_backward(loss)
        encoders.step()
        decoders.step()  # <- cause

    def configure_optimizers(self):
        return [torch.optim.Adam(self.encoder.parameters(), 1e-3), torch.optim.Adam(self.decoder.parameters(), 1e-3)]


trainer = lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu",
)
data = torch.utils.data.TensorDataset(torch.randn(256, 4))
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=8))
"""


# The batches of the validation pass through an iterator of a library's. `update_bn` is a validation of nobody's.
PROGRESS_BAR = """
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(0)
train, val, other = (DataLoader(TensorDataset(torch.randn(n, 4)), batch_size=8) for n in (128, 64, 64))
model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    for (x,) in tqdm(train):
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    update_bn(other, model)
    with torch.no_grad():
        for (x,) in tqdm(val):
            print(nn.functional.mse_loss(model(x), x).item())  # <- cause
"""


@pytest.mark.parametrize(
    ("package", "source", "code"),
    [
        pytest.param("lightning", LEFT_IN_EVALUATION, "TM613", id="left in evaluation mode"),
        pytest.param("lightning", NOT_CLEARED, "TM601", id="one optimizer not cleared", marks=pytest.mark.slow),
        pytest.param("tqdm", PROGRESS_BAR, "TM614", id="validation under a progress bar"),
    ],
)
def test_mistakes_in_a_loop_that_a_library_has_a_part_in(tmp_path: Path, package: str, source: str, code: str) -> None:
    pytest.importorskip(package)
    finished = run_script(tmp_path, source)
    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source), finished.stderr


LIBRARY_MODEL = """
import torch
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    num_labels=3,  # <- setting
)
model = BertForSequenceClassification(config)
model(input_ids=torch.randint(0, 50, (4, 6)), labels=torch.tensor([0, 1, 2, 3])).loss.backward()  # <- cause
"""


@pytest.mark.slow
def test_a_layer_of_a_library_leads_to_the_users_setting(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    finished = run_script(tmp_path, LIBRARY_MODEL)

    diagnosis = finished.only
    assert diagnosis.code == "TM301", finished.stderr
    lines = {place.role: place.line for place in diagnosis.locations if place.file == "train.py"}
    assert lines == {
        "cause": marked_line(LIBRARY_MODEL),
        "origin": marked_line(LIBRARY_MODEL, "# <- setting"),
    }, finished.stderr
