"""Runs that hang are explained at their line; runs that are only slow are left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest
from hanging import KILL, run_all
from pages import FENCE, PAGES
from running import Finished, marked_line

from torchmedic.records import Diagnosis

CASES = Path(__file__).parent / "hang_cases"
PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))]  # of all scripts, every fourth one


def _pages(kind: str) -> dict[str, str]:
    """The scripts of the TM5xx pages by code, and number where a page has several."""
    found = {}
    for page in sorted(PAGES.glob("TM5*.md")):
        blocks = [body for each, words, body in FENCE.findall(page.read_text()) if each == kind and not words.strip()]
        for number, body in enumerate(blocks):
            found[f"{page.name.split('-')[0]}.{number}"] = body
    return found


def _complaints(code: str, source: str, finished: Finished) -> list[str]:
    """What is wrong with how a hanging script was explained."""
    wanted = marked_line(source)
    told = [(found.code, found.cause_location and found.cause_location.line) for found in _judged(finished, wanted)]
    return [] if told == [(code, wanted)] else [f"{told} in place of {code} in line {wanted}\n{finished.stderr}"]


def _judged(finished: Finished, line: int) -> list[Diagnosis]:
    """What was said, but for notes that another line was slow: so is an import, on a machine that is taken."""
    return [
        found
        for found in finished.report.diagnoses
        if found.severity != "note" or found.cause_location is None or found.cause_location.line == line
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_hanging_scripts_are_explained_at_their_line(tmp_path: Path, part: int) -> None:
    scripts = _pages("fails") | {
        f"{path.stem.split('_')[0]}.{path.stem}": path.read_text()
        for path in sorted((CASES / "hanging").glob("TM*.py"))
    }
    scripts = _part(scripts, part)
    wrong = _misjudged(tmp_path / "together", scripts)
    for name in wrong:  # side by side they take the cores from each other: who could not answer then is asked alone
        again = _misjudged(tmp_path / "alone" / name, {name: scripts[name]})
        assert not again, f"{name}: {again[name][0]}\nand before: {wrong[name][0]}"


def _part(scripts: dict[str, str], part: int) -> dict[str, str]:
    return {name: source for place, (name, source) in enumerate(scripts.items()) if place % len(PARTS) == part}


def _misjudged(folder: Path, scripts: dict[str, str]) -> dict[str, list[str]]:
    folder.mkdir(parents=True)
    finished = run_all(folder, scripts, *KILL)
    return {name: said for name in scripts if (said := _complaints(name.split(".")[0], scripts[name], finished[name]))}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_slow_scripts_are_left_in_peace(tmp_path: Path, part: int) -> None:
    scripts = {f"{code}.healthy": source for code, source in _pages("passes").items()} | {
        path.stem: path.read_text() for path in sorted((CASES / "healthy").glob("*.py"))
    }
    scripts = _part(scripts, part)
    wrong = _alarmed(tmp_path / "together", scripts)
    for name in wrong:  # gloo deadlocks now and then at its end, and a machine that is taken may starve whom we ask
        again = _alarmed(tmp_path / "alone" / name, {name: scripts[name]})
        assert not again, f"{name}: {again[name]}\nand before: {wrong[name]}"


def _alarmed(folder: Path, scripts: dict[str, str]) -> dict[str, str]:
    """Slow scripts that did not end well, or of which more was said than notes."""
    folder.mkdir(parents=True)
    finished = run_all(folder, scripts)
    return {
        name: f"{[found.code for found in run.report.diagnoses]} status {run.returncode}\n{run.stderr}"
        for name, run in finished.items()
        if run.returncode or any(found.severity != "note" for found in run.report.diagnoses)
    }
