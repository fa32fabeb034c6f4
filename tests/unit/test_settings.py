"""Defaults < pyproject < environment < flags; what does not exist is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchmedic.errors import UsageError
from torchmedic.settings import Settings, load, rank


def test_the_order_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.torchmedic]\nformat = 'json'\nfail-on = 'error'\nconfidential = true"
    )
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)

    assert load({}, folder=below, environ={}) == Settings(format="json", fail_on="error", confidential=True)
    found = load({"format": None, "output": "x"}, folder=below, environ={"TORCHMEDIC_FORMAT": "concise"})
    assert found == Settings(output="x", format="concise", fail_on="error", confidential=True)
    assert load({"format": "full"}, folder=below, environ={"TORCHMEDIC_FORMAT": "concise"}).format == "full"


@pytest.mark.parametrize(
    ("pyproject", "environ", "says"),
    [
        ("[tool.torchmedic]\nformatt = 'json'", {}, "[tool.torchmedic]"),
        ("[tool.torchmedic]\nformat = 'yaml'", {}, "[tool.torchmedic]"),
        ("[tool.ruff\n[tool.torchmedic]\nconfidential = true", {}, "cannot read [tool.torchmedic]"),
        (" tool . torchmedic.confidential = true\na=" + "[" * 20_000, {}, "cannot read [tool.torchmedic]"),
        ("", {"TORCHMEDIC_FAIL_ON": "sometimes"}, "the environment"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, pyproject: str, environ: dict[str, str], says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(pyproject)
    with pytest.raises(UsageError) as caught:
        load({}, folder=tmp_path, environ=environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_codes_to_ignore(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.torchmedic]\nignore = ['TM601']\ncheckup = false")
    assert load({}, folder=tmp_path, environ={}) == Settings(ignore=("TM601",), checkup=False)
    found = load({"checkup": True}, folder=tmp_path, environ={"TORCHMEDIC_IGNORE": "TM602, TM603"})
    assert found == Settings(ignore=("TM602", "TM603"), checkup=True)


def test_a_broken_pyproject_is_its_owners_business(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    for content in (
        b"[tool.ruff\n",
        b"dependencies = [torchmedic\n",
        b"\xff\xfe\x00",
        b"a=" + b"[" * 20_000,
        b"a=" + b"9" * 5000,
    ):
        path.write_bytes(content)
        assert load({}, folder=tmp_path, environ={}) == Settings()
    path.unlink()
    os.mkfifo(path)
    assert load({}, folder=tmp_path, environ={}) == Settings()


def test_strange_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("tool = 3")
    assert load({}, folder=tmp_path, environ={}) == Settings()
    (tmp_path / "pyproject.toml").write_text("[tool]\ntorchmedic = 'on'")
    with pytest.raises(UsageError):
        load({}, folder=tmp_path, environ={})


def test_rank() -> None:
    assert rank({}) is None
    assert rank({"RANK": "3", "SLURM_PROCID": "1"}) == 3
    assert rank({"RANK": "", "SLURM_PROCID": "1"}) == 1
    assert rank({"RANK": "-1"}) is None
