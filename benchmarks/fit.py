"""Predicted against measured peak memory, for configurations that nobody tuned the prediction for.

Each configuration is a training script. `torchmedic fit` predicts it in a process that sees no card; then the same
script runs on the card and prints what the allocator counted. Configurations whose library is not installed are left
out.

    python benchmarks/fit.py --output fit-h200                # needs CUDA
    python benchmarks/fit.py --predict-only --only gpt2-124m   # the column of the prediction, on any machine

Bars: peak allocated within 1 % (median) and 3 % (90th percentile), reserved within 4 % (median), 10 s for gpt2-350m.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from measured_run import environment, save

HERE = Path(__file__).parent

SCRIPT = """
import contextlib
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, {folder!r})
{model}
model = build().cuda()
optimizer = {optimizer}
lower = {precision}
scaler = torch.amp.GradScaler("cuda", enabled={scaled})
for step in range(3):
    batch = draw({batch})
    with lower:
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-4)",
    "adamw-fused": "torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)",
    "adamw-loop": "torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "rmsprop": "torch.optim.RMSprop(model.parameters(), lr=1e-4)",
}
PRECISIONS = {
    "fp32": "contextlib.nullcontext()",
    "bf16": 'torch.autocast("cuda", dtype=torch.bfloat16)',
    "fp16": 'torch.autocast("cuda", dtype=torch.float16)',
}

GPT = """
import gpt
def build(): return gpt.GPT({size!r}, 1024)
def draw(rows): return torch.randint(0, gpt.VOCABULARY, (rows, 1025), device="cuda")
def loss_of(model, tokens): return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
"""
CHECKPOINTED = """
import functools
def build():
    made = gpt.GPT({size!r}, 1024)
    for block in made.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return made
"""
HUGGING_FACE = """
from transformers import {names}
def build(): return {build}
def draw(rows): return torch.randint(0, 1000, (rows, {length}), device="cuda")
def loss_of(model, ids): return model(input_ids=ids, labels={labels}).loss
"""
VISION = """
import {library} as library
def build(): return {build}
def draw(rows): return torch.randn(rows, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (rows,), device="cuda")
def loss_of(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
"""
RECURRENT = """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20000, 1024), nn.Linear({width}, 20000)
        self.rnn = nn.{kind}(1024, 1024, {layers}, batch_first=True, bidirectional={both})

    def forward(self, x): return self.out(self.rnn(self.words(x))[0])


def build(): return Tagger()
def draw(rows): return torch.randint(0, 20000, (rows, 256), device="cuda")
def loss_of(model, x): return F.cross_entropy(model(x).flatten(0, 1), x.flatten())
"""
PERCEPTRON = """
def build():
    layers = [part for _ in range(16) for part in (nn.Linear(4096, 4096), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(4096, 10))
def draw(rows): return torch.randn(rows, 4096, device="cuda"), torch.randint(0, 10, (rows,), device="cuda")
def loss_of(model, batch): return F.cross_entropy(model(batch[0]), batch[1])
"""
ENCODER = """
def build(): return nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 12)
def draw(rows): return torch.randn(rows, 512, 1024, device="cuda")
def loss_of(model, x): return model(x).square().mean()
"""


class Configuration(NamedTuple):
    name: str
    model: str
    optimizer: str
    precision: str
    batch: int
    library: str = "torch"


def _hugging_face(names: str, build: str, length: int, labels: str = "ids") -> str:
    return HUGGING_FACE.format(names=names, build=build, length=length, labels=labels)


def _vision(library: str, build: str) -> str:
    return VISION.format(library=library, build=build)


def _recurrent(kind: str, layers: int, both: bool) -> str:
    return RECURRENT.format(kind=kind, layers=layers, both=both, width=2048 if both else 1024)


def configurations() -> list[Configuration]:
    small, medium = GPT.format(size="gpt2-124m"), GPT.format(size="gpt2-350m")
    bert = _hugging_face(
        "BertConfig, BertForSequenceClassification", "BertForSequenceClassification(BertConfig())", 256, "ids[:, 0] % 2"
    )
    gpt2 = _hugging_face("GPT2Config, GPT2LMHeadModel", "GPT2LMHeadModel(GPT2Config())", 512)
    t5 = _hugging_face(
        "T5Config, T5ForConditionalGeneration", "T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))", 256
    )
    llama = _hugging_face(
        "LlamaConfig, LlamaForCausalLM",
        "LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, "
        "num_attention_heads=16, num_key_value_heads=4))",
        1024,
    )
    qwen = _hugging_face(
        "Qwen2Config, Qwen2ForCausalLM",
        "Qwen2ForCausalLM(Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=12, "
        "num_attention_heads=14, num_key_value_heads=2))",
        512,
    )
    resnet, efficient = "library.models.resnet50()", "library.models.efficientnet_v2_s()"
    vit, convnext = "library.create_model('vit_base_patch16_224')", "library.create_model('convnext_tiny')"
    mixer = "library.create_model('mixer_b16_224')"
    return [
        Configuration("gpt2-124m", small, "adamw", "bf16", 8),
        Configuration("gpt2-124m", small, "adamw", "fp32", 8),
        Configuration("gpt2-124m", small, "adamw-fused", "fp16", 8),
        Configuration("gpt2-124m", small, "sgd", "bf16", 16),
        Configuration("gpt2-350m", medium, "adamw", "bf16", 8),
        Configuration("gpt2-350m", medium, "adamw-loop", "bf16", 4),
        Configuration("gpt2-350m-checkpoint", medium + CHECKPOINTED.format(size="gpt2-350m"), "adamw", "bf16", 16),
        Configuration("gpt2-124m-checkpoint", small + CHECKPOINTED.format(size="gpt2-124m"), "adamw-fused", "fp32", 16),
        Configuration("hf-gpt2", gpt2, "adamw", "fp32", 8, "transformers"),
        Configuration("hf-gpt2", gpt2, "adamw-fused", "bf16", 8, "transformers"),
        Configuration("hf-bert", bert, "adamw", "fp32", 32, "transformers"),
        Configuration("hf-bert", bert, "adamw", "bf16", 32, "transformers"),
        Configuration("hf-t5-small", t5, "adamw", "bf16", 16, "transformers"),
        Configuration("hf-llama", llama, "adamw-fused", "bf16", 8, "transformers"),
        Configuration("hf-llama", llama, "adamw", "fp32", 4, "transformers"),
        Configuration("hf-qwen2", qwen, "adamw", "bf16", 8, "transformers"),
        Configuration("resnet50", _vision("torchvision", resnet), "momentum", "fp32", 64, "torchvision"),
        Configuration("resnet50", _vision("torchvision", resnet), "momentum", "fp16", 128, "torchvision"),
        Configuration("efficientnet-v2-s", _vision("torchvision", efficient), "rmsprop", "bf16", 64, "torchvision"),
        Configuration("timm-vit-base", _vision("timm", vit), "adamw", "bf16", 64, "timm"),
        Configuration("timm-vit-base", _vision("timm", vit), "adamw-fused", "fp32", 32, "timm"),
        Configuration("timm-convnext-tiny", _vision("timm", convnext), "adamw", "bf16", 64, "timm"),
        Configuration("timm-mixer", _vision("timm", mixer), "sgd", "fp32", 32, "timm"),
        Configuration("lstm-3", _recurrent("LSTM", 3, False), "adamw", "fp32", 32),
        Configuration("lstm-2-both-ways", _recurrent("LSTM", 2, True), "adamw", "fp16", 32),
        Configuration("gru-3", _recurrent("GRU", 3, False), "momentum", "fp32", 32),
        Configuration("perceptron", PERCEPTRON, "adamw", "fp32", 8192),
        Configuration("perceptron", PERCEPTRON, "momentum", "bf16", 8192),
        Configuration("encoder", ENCODER, "adamw", "fp32", 16),
        Configuration("encoder", ENCODER, "adamw-fused", "fp16", 32),
    ]


def script_of(configuration: Configuration) -> str:
    return SCRIPT.format(
        folder=str(HERE),
        model=configuration.model,
        optimizer=OPTIMIZERS[configuration.optimizer],
        precision=PRECISIONS[configuration.precision],
        scaled=configuration.precision == "fp16",
        batch=configuration.batch,
    )


def measure(configuration: Configuration, card: str, *, predict_only: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": configuration.name, "optimizer": configuration.optimizer}
    row |= {"precision": configuration.precision, "batch": configuration.batch}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(script_of(configuration))
        started = time.monotonic()
        command = [sys.executable, "-m", "torchmedic", "fit", str(script), "--device-name", card]
        without_card = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, "--no-plans", "--format", "json"], capture_output=True, text=True, check=False, env=without_card
        )
        row["seconds"] = round(time.monotonic() - started, 2)
        if not done.stdout:
            return row | {"error": done.stderr.strip()}
        need = json.loads(done.stdout)["need"]
        row |= {"predicted_allocated": need["allocated"], "predicted_reserved": need["reserved"]}
        if predict_only:
            return row
        real = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        if real.returncode:
            return row | {"error": (real.stderr.strip().splitlines() or [""])[-1]}
        row["allocated"], row["reserved"] = json.loads(real.stdout.splitlines()[-1])
    row["allocated_error"] = round(100 * (row["predicted_allocated"] / row["allocated"] - 1), 3)
    row["reserved_error"] = round(100 * (row["predicted_reserved"] / row["reserved"] - 1), 3)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in ("allocated_error", "reserved_error"):
        errors = sorted(abs(row[key]) for row in rows if key in row)
        if errors:
            found[f"{key}_median"] = round(statistics.median(errors), 3)
            found[f"{key}_90th"] = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="NAME", help="write benchmarks/results/NAME.json")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name contains this")
    parser.add_argument("--card", default="H200", help="the card of this machine, by its name in the table")
    parser.add_argument("--predict-only", action="store_true", help="do not run on a card")
    parser.add_argument("--jobs", type=int, default=1, help="configurations at a time; seconds mean little above 1")
    arguments = parser.parse_args()
    chosen = [
        configuration
        for configuration in configurations()
        if arguments.only in configuration.name and importlib.util.find_spec(configuration.library) is not None
    ]
    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        one = functools.partial(measure, card=arguments.card, predict_only=arguments.predict_only)
        for row in pool.map(one, chosen):
            rows.append(row)
            print(json.dumps(row), flush=True)
    device = "cpu" if arguments.predict_only else "cuda"
    print(json.dumps(summary(rows)))
    save(arguments.output, {**environment(device), "rows": rows, "summary": summary(rows)})


if __name__ == "__main__":
    main()
