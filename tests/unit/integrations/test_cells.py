"""Cells of IPython 7, which Colab runs: their files have no numbers, and their code is not called `<module>`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from running import run_script

from torchmedic.integrations.notebook import with_cell_numbers
from torchmedic.records import Diagnosis, Location

CELL = """
import torch
from torch import nn

h = torch.sigmoid(nn.Linear(4, 4)(torch.randn(8, 4)))
h += 1
h.square().mean().backward()
"""
# The names that IPython 7.34 gives to the file and to the code of a cell.
KERNEL = f"""
import linecache

name = "/tmp/ipykernel_1/902350343.py"
text = {CELL!r}
linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
exec(compile(text, name, "exec").replace(co_name="<cell line: 2>"), {{}})
"""


def test_a_step_in_a_cell_is_replayed(tmp_path: Path) -> None:
    diagnosis = run_script(tmp_path, KERNEL).only
    assert (diagnosis.code, diagnosis.grade) == ("TM102", "proven")
    assert diagnosis.cause_location is not None
    assert diagnosis.cause_location.line == 6
    assert any(treatment.proven for treatment in diagnosis.treatments)


def test_files_get_the_numbers_of_their_cells() -> None:
    files = {"a\n": "/tmp/k/1.py", "b": "/tmp/k/2.py"}  # the kernel hashes the text of a cell, as it was sent
    compiler = SimpleNamespace(get_code_name=lambda raw, _, number: files.get(raw, "/tmp/k/other.py"))
    shell = SimpleNamespace(compile=compiler, user_ns={"_i": "b", "_i3": "a", "_i4": "b", "_ih": ["", "a", "b"]})
    places = tuple(Location(role="cause", file=file, line=2) for file in ("/tmp/k/1.py", "/tmp/k/2.py", "train.py"))
    found = Diagnosis(
        code="TM201", name="n", grade="proven", message="m", cause="seen at /tmp/k/2.py:7", step=7, locations=places
    )
    shown = with_cell_numbers(shell, found)
    assert [place.file for place in shown.locations] == ["cell [3]", "cell [4]", "train.py"]
    assert shown.cause == "seen at cell [4], line 7"
