"""A file that is edited during the run is not shown as what ran, without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import run_script

HELPER = """
import torch


def fail(model):
    x = torch.ones(2, 7)
    return model(x)
"""
EDITS = {
    "not edited": (HELPER, False),
    "written again as it was": (HELPER + "\n\n# the next part\n", False),
    "lines moved": ("SIZE = 7  # for the next run\n" + HELPER, True),
    "half written": (HELPER.replace("torch.ones(2, 7)", "torch.ones(2,"), True),
}
SCRIPT = f"""
from pathlib import Path
import torch
Path("helper.py").write_text({HELPER!r})
import helper

model = torch.nn.Linear(8, 1)
Path("helper.py").write_text(Path("edited.txt").read_text())
helper.fail(model)
"""


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_told(tmp_path: Path, name: str) -> None:
    text, is_told = EDITS[name]
    (tmp_path / "edited.txt").write_text(text)

    found = run_script(tmp_path, SCRIPT).only

    assert found.code == "TM151"
    assert ("helper.py was changed during the run" in " ".join(found.evidence)) == is_told
    assert found.grade == ("likely" if is_told else "proven")
