"""Scripts of single rules, in rule_cases/CODE.txt: a line `=== name CODE` or `=== name healthy`, then the script.

`=== name CODE slow` marks a script as slow.

A script with a code must be diagnosed with it at the line that ends in `# <- cause`; a healthy one is told nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import check_failure, check_health
from running import run_script

_CASE = r"^=== (\S+) (\S+)( slow)?\n(.*?)(?=^=== |\Z)"
FOLDER = Path(__file__).parent / "rule_cases"


def cases(*, healthy: bool) -> list[object]:
    return [
        pytest.param(code, source, id=f"{path.stem}-{name}", marks=pytest.mark.slow if slow else ())
        for path in sorted(FOLDER.glob("TM*.txt"))
        for name, code, slow, source in re.findall(_CASE, path.read_text(), re.M | re.S)
        if (code == "healthy") is healthy
    ]


@pytest.mark.parametrize(("code", "source"), cases(healthy=False))
def test_the_cause_is_named_at_its_line(tmp_path: Path, code: str, source: str) -> None:
    check_failure(code, source, run_script(tmp_path, source))


@pytest.mark.parametrize(("code", "source"), cases(healthy=True))
def test_a_healthy_script_is_told_nothing(tmp_path: Path, code: str, source: str) -> None:
    check_health(run_script(tmp_path, source))


def test_a_refused_file_is_not_executed_to_explain_it(tmp_path: Path) -> None:
    sources = {param.id: param.values[1] for param in cases(healthy=False)}  # type: ignore[attr-defined]
    finished = run_script(tmp_path, sources["TM180-a-blocked-module"])
    assert finished.only.code == "TM180"
    assert not (tmp_path / "executed").exists()
