"""Every script in `trajectory_cases` runs away in its numbers, or only looks as if it did.

The format is that of `number_cases` (see `test_number_rules.py`): `#### name CODE words`, and the line to blame ends
with `# <- cause`. `cure` asks for a treatment that was proven on several steps, `slow` marks the case as slow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from forking import watch_script

CASES = Path(__file__).parent / "trajectory_cases"
SECTION = re.compile(r"^#### (\S+) (.*)\n", re.M)
FILE = re.compile(r"^# file: (\S+)\n", re.M)


class Case(NamedTuple):
    codes: tuple[str, ...]
    words: frozenset[str]
    files: dict[str, str]

    @property
    def line(self) -> tuple[str, int] | None:
        for name, text in self.files.items():
            for number, line in enumerate(text.splitlines(), 1):
                if line.endswith("# <- cause"):
                    return name, number
        return None


def cases() -> list[object]:
    found = []
    for path in sorted(CASES.glob("*.txt")):
        parts = SECTION.split(path.read_text())
        for name, expected, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            codes, *words = expected.split()
            first, *rest = FILE.split(text)
            files = {"train.py": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
            case = Case(tuple(codes.split("|")), frozenset(words), files)
            marks = [pytest.mark.slow] if "slow" in words else []
            found.append(pytest.param(case, id=f"{path.stem}-{name}", marks=marks))
    return found


@pytest.mark.parametrize("case", cases())
def test_what_made_training_run_away(case: Case, tmp_path: Path) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    watched = watch_script(tmp_path)

    assert watched.faults == []
    if case.codes == ("silent",):
        assert watched.diagnoses == [], watched.output
        return
    assert len(watched.diagnoses) == 1, f"{[found.code for found in watched.diagnoses]}\n{watched.output}"
    (diagnosis,) = watched.diagnoses
    place = next((each for each in diagnosis.locations if each.role == "cause"), None)
    told = f"{diagnosis.code} {diagnosis.grade}, line {place.line if place else None}: {diagnosis.message}"
    assert diagnosis.code in case.codes, told
    assert place is not None, told
    assert (place.file, place.line) == case.line, told
    if "proven" in case.words:
        assert diagnosis.grade == "proven", told
    if "cure" in case.words:
        assert any(each.proven and "update" in each.tried_on for each in diagnosis.treatments), told
