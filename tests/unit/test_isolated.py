"""Which processes are torchmedic's own, so that their search path may be changed, and which are the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmedic import _isolated as isolated


@pytest.mark.parametrize(
    ("words", "arguments", "own"),
    [
        (["python", "/env/bin/torchmedic", "run", "a.py"], ["/env/bin/torchmedic", "run", "a.py"], True),
        (["python", "-m", "torchmedic", "run", "a.py"], ["-m", "run", "a.py"], True),
        (["python", "-um", "torchmedic.repro.worker"], ["-m"], True),
        (["python", "-X", "dev", "-mtorchmedic", "report"], ["-m", "report"], True),
        (["python", "-m", "mine.train"], ["-m"], False),  # a package of the user's that imports torchmedic
        (["python", "-m", "mine", "-m", "torchmedic"], ["-m", "-m", "torchmedic"], False),
        (["python", "train.py", "-m", "torchmedic"], ["train.py", "-m", "torchmedic"], False),
        (["python"], [""], False),
        (["python", "-c", "import torchmedic"], ["-c"], False),
        (["embedded"], [], False),
    ],
)
def test_own_processes(words: list[str], arguments: list[str], own: bool) -> None:
    assert isolated._is_own_process(words, arguments) is own


def test_the_environment_of_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = os.pathsep.join([".", "", "lib", "/opt/more", str(tmp_path)])
    assert isolated._given({"PYTHONPATH": given}) == [str(tmp_path / "lib"), "/opt/more"]
    assert isolated.environment({"PYTHONPATH": given, "TORCHMEDIC_OUTPUT": "x", "HOME": "/"}) == {"HOME": "/"}
