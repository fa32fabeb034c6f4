"""Jobs of several ranks that fail are explained once, with the rank and line to blame; their twins are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import check_failure, check_health, rank_scripts
from rank_jobs import CASES as CASES_FOLDER
from rank_jobs import Case, cases, complaint, run_ranks

pytestmark = pytest.mark.timeout(200)

# Every run of the tests has the first case of each code; `make test-all` has the others too.
_FIRST = {
    code: next(case.name for case in cases() if case.name.startswith(code)) for code in {c.name[:5] for c in cases()}
}
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in _FIRST.values() else pytest.mark.slow) for case in cases()
]


@pytest.mark.parametrize("case", CASES)
def test_the_rank_and_the_line_to_blame_are_named(tmp_path: Path, case: Case) -> None:
    finished = run_ranks(tmp_path, case.failing, case.ranks)
    assert finished.returncode != 0
    assert not complaint(case, finished), f"{complaint(case, finished)}\n{finished.stderr}"


@pytest.mark.parametrize("case", CASES)
def test_the_healthy_twin_is_left_alone(tmp_path: Path, case: Case) -> None:
    finished = run_ranks(tmp_path, case.twin, case.ranks)
    assert finished.returncode == 0, finished.stderr
    # A note is not printed: on a machine that is taken, an import may be silent for longer than the limit.
    assert [found for found in finished.report.diagnoses if found.severity != "note"] == []
    assert "torchmedic" not in finished.stderr


@pytest.mark.parametrize(("code", "ranks", "source"), rank_scripts("fails"))
def test_the_failing_script_of_a_page(tmp_path: Path, code: str, ranks: int, source: str) -> None:
    check_failure(code, source, run_ranks(tmp_path, source, ranks))


@pytest.mark.parametrize(("code", "ranks", "source"), rank_scripts("passes"))
def test_the_healthy_script_of_a_page(tmp_path: Path, code: str, ranks: int, source: str) -> None:
    check_health(run_ranks(tmp_path, source, ranks))


@pytest.mark.parametrize("path", sorted((CASES_FOLDER / "healthy").glob("*.py")), ids=lambda path: path.stem)
def test_ranks_that_differ_on_purpose_are_left_alone(tmp_path: Path, path: Path) -> None:
    source = path.read_text()
    finished = run_ranks(tmp_path, source, int(source.split()[2]))
    assert finished.returncode == 0, finished.stderr
    assert [found.code for found in finished.report.diagnoses if found.severity != "note"] == []
    assert "torchmedic" not in finished.stderr
