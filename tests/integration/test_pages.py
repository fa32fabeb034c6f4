"""Every page of docs/diagnoses holds a script that must fail with its code at its marked line, and a cured twin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from memory_limit import HOST_MARK, MARK, run_limited
from pages import PAGES, check_failure, check_health, kinds, scripts
from running import Finished, run_script, torchmedic

from torchmedic.diagnose import catalogue


def run_page(folder: Path, source: str) -> Finished:
    if '"spawn"' in source:  # a child of the test's own process would not import torchmedic
        (folder / "train.py").write_text(source)
        return torchmedic(folder, "train.py")
    return run_limited(folder, source) if source.startswith((MARK, HOST_MARK)) else run_script(folder, source)


@pytest.mark.parametrize(("code", "source"), scripts("fails"))
def test_the_failing_script_is_diagnosed_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    check_failure(code, source, run_page(tmp_path, source))


@pytest.mark.parametrize(("code", "source"), scripts("passes"))
def test_the_cured_twin_is_healthy(tmp_path: Path, code: str, source: str) -> None:
    check_health(run_page(tmp_path, source))


def test_every_rule_has_its_page_with_both_scripts() -> None:
    for entry in catalogue.entries():
        page = PAGES / f"{entry.code}-{entry.name}.md"
        assert page.is_file(), page
        assert kinds(page) == {"fails", "passes"}, page


def test_every_page_has_its_rule() -> None:
    names = {f"{entry.code}-{entry.name}" for entry in catalogue.entries()}
    assert {page.stem for page in PAGES.glob("TM*.md")} == names


def test_the_index_is_what_make_docs_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_index", PAGES.parent / "make_index.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (PAGES / "README.md").read_text() == module.index(), "run `make docs`"
