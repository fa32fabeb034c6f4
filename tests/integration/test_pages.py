"""Every page of docs/diagnoses holds a script that must fail with its code at its marked line, and a cured twin."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from memory_limit import MARK, run_limited
from running import Finished, marked_line, run_script

from torchmedic.diagnose import catalogue

PAGES = Path(__file__).parents[2] / "docs" / "diagnoses"
FENCE = re.compile(r"^```python (fails|passes)[^\n]*\n(.*?)^```$", re.M | re.S)


def scripts(kind: str) -> list[object]:
    found = []
    for page in sorted(PAGES.glob("TM*.md")):
        code = page.name.split("-")[0]
        blocks = [body for kind_found, body in FENCE.findall(page.read_text()) if kind_found == kind]
        found += [pytest.param(code, body, id=f"{code}-{number}") for number, body in enumerate(blocks)]
    return found


def run_page(folder: Path, source: str) -> Finished:
    return run_limited(folder, source) if source.startswith(MARK) else run_script(folder, source)


@pytest.mark.parametrize(("code", "source"), scripts("fails"))
def test_the_failing_script_is_diagnosed_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    finished = run_page(tmp_path, source)

    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None, finished.stderr
    where = (diagnosis.cause_location.file, diagnosis.cause_location.line)
    assert where == ("train.py", marked_line(source)), finished.stderr
    assert f"[{code}]" in finished.stderr


@pytest.mark.parametrize(("code", "source"), scripts("passes"))
def test_the_cured_twin_is_healthy(tmp_path: Path, code: str, source: str) -> None:
    finished = run_page(tmp_path, source)

    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == ()


def test_every_rule_has_its_page_with_both_scripts() -> None:
    for entry in catalogue.entries():
        page = PAGES / f"{entry.code}-{entry.name}.md"
        assert page.is_file(), page
        assert {kind for kind, _ in FENCE.findall(page.read_text())} == {"fails", "passes"}, page


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
