"""The table of an out-of-memory on a real card adds up, and the line that holds most is the right one.

Five models, each running out in its forward pass, in backward and in the first step of the optimizer, on a card that is
made small with `set_per_process_memory_fraction`. What each line really saves is measured in the script itself, with
saved-tensor hooks on a forward pass that fits.

    python -m pytest -m gpu tests/gpu/test_memory_cuda.py -s
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Finished, torchmedic

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

HEAD = f"""
import json
import os
import sys

if PHASE != "forward":  # no block is cut up, so that what the forward pass has freed goes back whole
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:20"

import torch
from torch import nn
import torch.nn.functional as F

sys.path.insert(0, {str(BENCHMARKS)!r})
torch.manual_seed(0)
TOTAL = torch.cuda.get_device_properties(0).total_memory


def cap(nbytes):
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / TOTAL))


def saved_by_line(forward):
    # What a forward pass saves, in order: the innermost line outside of installed packages, and bytes.
    order, seen = [], set()
    weights = {{p.untyped_storage()._cdata for p in model.parameters()}}

    def pack(tensor):
        key = tensor.untyped_storage()._cdata
        if key not in weights and key not in seen and tensor.is_cuda:
            seen.add(key)
            frame = sys._getframe(1)
            while frame is not None and "site-packages" in frame.f_code.co_filename:
                frame = frame.f_back
            order.append((frame.f_code.co_filename, frame.f_lineno, tensor.untyped_storage().nbytes()))
        return tensor.detach()  # as it is, a result would hold the node that holds it

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()
    print(json.dumps(order))
    return torch.cuda.max_memory_allocated() - before
"""

LOOP = """
model = build().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
needed = saved_by_line(lambda: forward(batch()))
if PHASE == "step":  # gradients that are made between activations would leave room between them for the state
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
for step in range(2):
    x = batch()
    optimizer.zero_grad(set_to_none=PHASE != "step")
    torch.cuda.empty_cache()
    if PHASE == "forward" and step == 1:
        cap(torch.cuda.memory_reserved() + int(0.6 * needed))
    loss = forward(x)
    if PHASE == "backward" and step == 1:
        torch.cuda.empty_cache()
        cap(torch.cuda.memory_reserved() + 2**21)
    loss.backward()
    if PHASE == "step":
        torch.cuda.empty_cache()
        cap(torch.cuda.memory_reserved() + sum(p.nbytes for p in model.parameters()) // 2)
    optimizer.step()
"""

MODELS = {
    "gpt2-124m": """
from gpt import GPTLoss, VOCABULARY
def build():
    return GPTLoss("gpt2-124m", 1024, "cuda")
def batch():
    return torch.randint(0, VOCABULARY, (8, 1025), device="cuda")
def forward(x):
    return model(x)
""",
    "resnet-50": """
class Bottleneck(nn.Module):
    def __init__(self, given, width, stride):
        super().__init__()
        self.a, self.b = nn.Conv2d(given, width, 1, bias=False), nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.c = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.na, self.nb, self.nc = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)
        self.skip = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
    def forward(self, x):
        h = F.relu(self.na(self.a(x)))
        h = F.relu(self.nb(self.b(h)))
        return F.relu(self.nc(self.c(h)) + self.skip(x))
def own():
    parts, given = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            parts.append(Bottleneck(given, width, stride if number == 0 else 1))
            given = 4 * width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
def build():
    try:
        import torchvision
        return torchvision.models.resnet50()
    except ImportError:
        pass
    try:
        import timm
        return timm.create_model("resnet50")
    except ImportError:
        return own()
def batch():
    return torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")
def forward(x):
    return F.cross_entropy(model(x[0]), x[1])
""",
    "bert": """
from transformers import BertConfig, BertForMaskedLM
def build():
    return BertForMaskedLM(BertConfig())
def batch():
    return torch.randint(0, 30522, (16, 256), device="cuda")
def forward(x):
    return model(input_ids=x, attention_mask=torch.ones_like(x), labels=x).loss
""",
    "u-net": """
class Level(nn.Module):
    def __init__(self, given, width):
        super().__init__()
        self.a, self.b = nn.Conv2d(given, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.na, self.nb = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
    def forward(self, x):
        h = F.silu(self.na(self.a(x)))
        return F.silu(self.nb(self.b(h)))
class UNet(nn.Module):
    def __init__(self, widths=(128, 256, 512, 512)):
        super().__init__()
        self.down = nn.ModuleList(Level(a, b) for a, b in zip((4, *widths[:-1]), widths))
        self.up = nn.ModuleList(Level(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1]))
        self.out = nn.Conv2d(widths[0], 4, 1)
    def forward(self, x):
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2)
        for level, skip in zip(self.up, kept[-2::-1]):
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.out(x)
def build():
    return UNet()
def batch():
    return torch.randn(16, 4, 64, 64, device="cuda")
def forward(x):
    noise = torch.randn_like(x)
    return F.mse_loss(model(x + noise), noise)
""",
    "lstm": """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20000, 1024)
        self.rnn = nn.LSTM(1024, 1024, 3, batch_first=True)
        self.out = nn.Linear(1024, 20000)
    def forward(self, x):
        h, _ = self.rnn(self.words(x))
        return self.out(h)
def build():
    return Tagger()
def batch():
    return torch.randint(0, 20000, (32, 257), device="cuda")
def forward(x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
""",
}


def autopsy_in(finished: Finished) -> dict[str, Any]:
    lines = (finished.run / "rank0" / "events.jsonl").read_text().splitlines()
    return next(event for line in lines if (event := json.loads(line))["kind"] == "memory-autopsy")


def could_hold_most(order: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    """The lines that hold most at some moment of the last two thirds of a forward pass."""
    total = sum(nbytes for _, _, nbytes in order)
    sums: dict[tuple[str, int], int] = {}
    done, found = 0, set()
    for file, line, nbytes in order:
        sums[file, line] = sums.get((file, line), 0) + nbytes
        done += nbytes
        if done > total / 3:
            found.add(max(sums, key=lambda key: sums[key]))
    return found


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
@pytest.mark.parametrize("name", MODELS)
def test_the_table_adds_up_and_the_line_is_right(tmp_path: Path, name: str, phase: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(f"PHASE = {phase!r}\n" + HEAD + MODELS[name] + LOOP)
    finished = torchmedic(tmp_path, "train.py", timeout=200)
    assert "out of memory" in finished.stderr, finished.stderr[-3000:]
    assert "fault of its own" not in finished.stderr, finished.stderr[-3000:]
    record = autopsy_in(finished)
    found = finished.report.diagnoses[-1]
    rows, total, measured = record["rows"], record["total"], record["measured"]
    left = rows.get("not accounted for", 0)
    top = record["lines"][0] if record["lines"] else {"file": "", "line": 0, "bytes": 0}
    print(
        f"\n{name:10} {phase:8} {found.code} total {measured / 2**30:.2f} GiB, rows off by "
        f"{100 * (total - measured) / measured:+.2f} %, not accounted for {100 * left / measured:.2f} % of all, "
        f"{100 * left / max(1, record['allocated']):.2f} % of what torch has; {record['method']}; "
        f"most saved at {Path(top['file']).name}:{top['line']} {top['bytes'] / 2**20:.0f} MiB"
    )
    print("  ", {heading: f"{nbytes / 2**20:.0f}" for heading, nbytes in rows.items() if nbytes > 1 << 20})
    assert abs(total - measured) <= 0.02 * measured, rows
    assert left <= 0.02 * measured, rows
    if phase == "step":
        assert found.code == "TM408", finished.stderr
        assert found.cause_location is not None
        assert found.cause_location.code.startswith("optimizer.step()")
        return
    assert found.code == "TM402", finished.stderr
    order = [tuple(each) for each in json.loads(finished.stdout.splitlines()[0])]
    assert (top["file"], top["line"]) in could_hold_most(order), (top, finished.stderr)


def test_the_operation_that_failed_in_backward_is_traced_to_its_forward_line(tmp_path: Path) -> None:
    source = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)
    def forward(self, x):
        h = torch.tanh(self.a(x))
        wide = h.repeat(1, 64)
        narrow = wide.view(len(x), 64, 256).mean(1)  # its gradient is 64 times as large as what it saves
        return self.b(narrow)

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = torch.cuda.get_device_properties(0).total_memory
for step in range(2):
    x = torch.randn(8192, 256, device="cuda")
    optimizer.zero_grad()
    loss = model(x).square().mean()
    if step == 1:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 200 * 2**20) / total)
    loss.backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(source)
    finished = torchmedic(tmp_path, "train.py")
    found = finished.report.diagnoses[-1]
    assert found.code == "TM402", finished.stderr
    origin = next((place for place in found.locations if place.role == "origin"), None)
    assert origin is not None, finished.stderr
    assert origin.code.startswith(("narrow =", "wide =")), finished.stderr


def test_the_autopsy_takes_no_memory_of_the_device(tmp_path: Path) -> None:
    source = (
        "PHASE = 'backward'\n"
        + HEAD
        + MODELS["gpt2-124m"]
        + """
import atexit
state = {}
before = sys.excepthook
def look(kind, error, tb):
    state.update(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())
    torch.cuda.reset_peak_memory_stats()
    before(kind, error, tb)
    print(json.dumps([state, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]), flush=True)
sys.excepthook = look
"""
        + LOOP
    )
    (tmp_path / "train.py").write_text(source)
    finished = torchmedic(tmp_path, "train.py")
    state, allocated, reserved = json.loads(finished.stdout.splitlines()[-1])
    assert finished.report.diagnoses, finished.stderr
    assert allocated == state["allocated"]
    assert reserved == state["reserved"]
