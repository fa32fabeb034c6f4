"""The line to blame where gradients are exchanged by hand, and those of some weights are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.detect.ranks.left_out_models import exchanging_line
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog

SKIPS = """
for name, parameter in model.named_parameters():
    if "bias" in name:  # <- cause
        continue
    dist.all_reduce(parameter.grad)
"""
PART = """
for parameter in model.body.parameters():  # <- cause
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
"""
ONE = """
for step in range(8):
    loss.backward()
    dist.all_reduce(model.weight.grad)  # <- cause
"""


@pytest.mark.parametrize("source", [SKIPS, PART, ONE])
def test_the_choice_of_what_is_exchanged_is_named(tmp_path: Path, source: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    lines = source.splitlines()
    called = next(number for number, line in enumerate(lines, 1) if "all_reduce" in line)
    frame = StackFrame(file=str(path), line=called, function="<module>")
    metric = Collective(op="all_reduce", shapes=((),), frames=(StackFrame(file=str(path), line=1, function=""),))
    log = RankLog(rank=0, pid=1, calls=(Collective(op="all_reduce", shapes=((4,),), frames=(frame,)), metric))
    found = exchanging_line(log, [(4,)])
    assert found is not None
    assert "# <- cause" in lines[found.line - 1]
