"""The environment that a script is started with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmedic.settings import HOME_VARIABLE
from torchmedic.supervise.child import launch


def test_the_agent_finds_dependencies_that_lie_on_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster, packages are often found through PYTHONPATH alone."""
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "safetensors", raising=False)

    homes = launch.environment(tmp_path, hide=True)[HOME_VARIABLE].split(os.pathsep)

    assert str(tmp_path) in homes
    assert homes[0] == str(Path(launch.torchmedic.__file__).parents[1])
