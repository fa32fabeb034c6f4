"""Where memory went, in code that is not a plain loop of the user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from running import Finished, marked_line, run_script

LIMIT = """
import resource
def room(nbytes):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
"""

COMPILED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x)) * x
        return x
model = torch.compile(Net(), backend="eager", dynamic=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(65536, 256)
def train():
    for count in (256, 512, 65536):
        if count > 512:
            room(200 << 20)
        loss = model(rows[:count]).square().mean()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
train()
"""

LIBRARY = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
    def forward(self, x):
        h = self.up(x)
        h = torch.tanh(h)  # <- most
        return x + self.down(h)
def fit(model, optimizer, batches):
    for batch in batches:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

USES_LIBRARY = """
import os, sys
sys.path.insert(0, os.path.join(os.getcwd(), "site-packages"))
import torch
import trainlib
class Deprecated:
    @property
    def __class__(self):
        import warnings
        warnings.warn("do not look at this", FutureWarning)
        return object
old = Deprecated()
model = torch.nn.Sequential(*[trainlib.Block() for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(32768, 64)
room(300 << 20)
trainlib.fit(model, optimizer, [rows[:64], rows[:64], rows])  # <- cause
"""

EVALUATOR = """
import torch
from torch import nn
class Evaluator:
    def __init__(self, model):
        self.model, self.logits = model, []
    @torch.no_grad()
    def update(self, x):
        self.logits.append(self.model(x))  # <- cause
model = nn.Linear(16, 1024)
evaluator = Evaluator(model.eval())
room(400 << 20)
for _ in range(1000):
    evaluator.update(torch.randn(4096, 16))
"""


def autopsy(finished: Finished) -> dict[str, Any]:
    lines = (finished.run / "rank0" / "events.jsonl").read_text().splitlines()
    return next(event for line in lines if (event := json.loads(line))["kind"] == "memory-autopsy")


def cause(finished: Finished) -> int:
    place = finished.report.diagnoses[-1].cause_location
    assert place is not None, finished.stderr
    return place.line


def test_compiled_code_is_told_by_the_line_that_calls_it(tmp_path: Path) -> None:
    source = LIMIT + COMPILED
    finished = run_script(tmp_path, source)

    assert finished.returncode == 1, finished.stderr
    assert cause(finished) == marked_line(source), finished.stderr  # not the `def` line that such a frame stands at
    assert autopsy(finished)["method"] != "fake replay"  # what it keeps is not what the code would


def test_lines_of_a_library_stand_in_where_it_runs_the_loop(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "trainlib.py").write_text(LIBRARY)
    source = LIMIT + USES_LIBRARY
    finished = run_script(tmp_path, source)

    assert cause(finished) == marked_line(source), finished.stderr
    top = autopsy(finished)["lines"][0]
    assert (Path(top["file"]).name, top["line"]) == ("trainlib.py", marked_line(LIBRARY, "most")), finished.stderr
    assert f"at trainlib.py:{top['line']}" in " ".join(finished.stderr.split()), finished.stderr
    assert "do not look" not in finished.stderr.rpartition("error[")[2]


def test_what_an_evaluation_collects_is_found_without_a_training_step(tmp_path: Path) -> None:
    source = LIMIT + EVALUATOR
    finished = run_script(tmp_path, source)

    assert finished.report.diagnoses[-1].code == "TM412", finished.stderr
    assert cause(finished) == marked_line(source), finished.stderr
