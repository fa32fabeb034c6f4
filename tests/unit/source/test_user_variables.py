"""Which files are the user's, also when the script has come to its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import loaded_files


def test_a_script_is_known_after_python_has_taken_its_name_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules at the end of a run would otherwise find no line that steps, thaws or names anything."""
    script = str(tmp_path / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    assert is_user_file(script)
    assert script in loaded_files()
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert script in loaded_files()


def test_a_relative_name_is_judged_in_a_deleted_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert is_user_file("part_of_a_deleted_folder.py")


def test_an_entry_that_is_no_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __getattr__(self, name: str) -> object:
            raise SystemExit(name)

    monkeypatch.setitem(sys.modules, "odd", Odd())
    assert loaded_files() is not None
