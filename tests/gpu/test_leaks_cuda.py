"""Leaks of device memory while they grow, on a real card: holder, line, and the step at which memory ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import marked_line, run_script

pytestmark = pytest.mark.gpu

KEPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(70):
    x = torch.randn(512, 256, device="cuda")
    out = model(x)
    loss = (out - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append({})  # <- cause
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"out": out}', "TM450"),
        ('{"loss": loss}', "TM450"),
        ("model(x)", "TM450"),  # no backward goes through it: everything that was saved stays
        ("torch.cat([out.detach()] * 8)", "TM452"),
    ],
)
def test_a_leak_on_the_card_is_named(tmp_path: Path, line: str, code: str) -> None:
    source = KEPT.replace("{}", line)
    finished = run_script(tmp_path, source)

    assert finished.returncode == 0, finished.stderr
    diagnosis = finished.only
    assert (diagnosis.code, diagnosis.severity) == (code, "warning"), finished.stderr
    assert "`kept`" in diagnosis.message
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == marked_line(source)
    if line != '{"loss": loss}':
        facts = " ".join(diagnosis.evidence)
        assert re.search(r"memory allocated on the GPU grew by [\d.]+ MiB from step \d+ to step \d+", facts)
    if line in ("model(x)", "torch.cat([out.detach()] * 8)"):  # of the other one the end is too far off to be told
        assert re.search(r"left on the GPU: at this rate they are used up at about step [\d,]+", facts)


@pytest.mark.parametrize("line", ["out.detach().mean()", "loss.detach()", "None"])
def test_what_only_looks_like_one_is_not(tmp_path: Path, line: str) -> None:
    finished = run_script(tmp_path, KEPT.replace("{}", line))

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == (), finished.stderr


def test_the_memory_series_has_the_allocator_in_it(tmp_path: Path) -> None:
    finished = run_script(tmp_path, KEPT.replace("{}", "None"))

    lines = [json.loads(line) for line in (finished.run / "rank0" / "events.jsonl").read_text().splitlines()]
    series = [line for line in lines if line["kind"] == "memory" and "allocated" in line]
    assert series
    assert all(0 < line["allocated"] <= line["peak"] <= line["reserved"] for line in series)
