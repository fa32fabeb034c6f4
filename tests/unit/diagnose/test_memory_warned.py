"""A warning of what grows speaks for it when memory has ended and little of it is held in tensors."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchmedic.diagnose.rules.memory._growth import grown_meanwhile, was_warned
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.records import Diagnosis
from torchmedic.runfolder.files import write_diagnosis


def filler(tmp_path: Path) -> Filler:
    script = tmp_path / "train.py"
    script.write_text("kept = []\nfor step in range(9):\n    kept.append(step)\n")
    call = next(
        node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call) and node.lineno == 3
    )
    return Filler(str(script), call, None, True)


def autopsy(folder: Path, *sizes: int, on_device: bool = False) -> Any:
    looks = [SimpleNamespace(rss=size, device=2 * size) for size in sizes]
    agent = SimpleNamespace(open=lambda: SimpleNamespace(path=folder), leaks=SimpleNamespace(looks=looks))
    return SimpleNamespace(agent=agent, exhaustion=SimpleNamespace(on_device=on_device))


def test_the_warning_must_be_of_that_line_and_kind(tmp_path: Path) -> None:
    line = filler(tmp_path)
    place = line.location("cause", "")
    said = Diagnosis(
        code="TM450", name="graphs-kept", severity="warning", grade="proven", message="", cause="", locations=(place,)
    )
    write_diagnosis(tmp_path, said)

    assert was_warned(autopsy(tmp_path), line, ("TM450",))
    assert not was_warned(autopsy(tmp_path), line, ("TM452",))
    other = Filler(line.file, ast.parse("kept").body[0], None, True)
    assert not was_warned(autopsy(tmp_path), other, ("TM450",))


def test_growth_is_from_the_first_look_to_the_last(tmp_path: Path) -> None:
    assert grown_meanwhile(autopsy(tmp_path, 100, 300, 250)) == 150
    assert grown_meanwhile(autopsy(tmp_path, 100, 300, 250, on_device=True)) == 300
    assert grown_meanwhile(autopsy(tmp_path, 100, 50)) == 0
    assert grown_meanwhile(autopsy(tmp_path)) == 0
