"""Every script in `number_cases` goes wrong in a number, or only looks as if it did.

A section begins with `#### name what-to-expect`. What is expected is a code (or several that are right), then words:
`proven` for its grade, `cure` for a treatment that was proven on the step, or `silent`. The line to blame ends with
`# <- cause`. A section may hold further files after `# file: name`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from forking import watch_script

CASES = Path(__file__).parent / "number_cases"
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
                if line.rstrip().endswith("# <- cause"):
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
            found.append(pytest.param(case, id=f"{path.stem}-{name}"))
    return found


@pytest.mark.parametrize("case", cases())
def test_the_cause_is_named(case: Case, tmp_path: Path) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    watched = watch_script(tmp_path)

    assert watched.faults == []
    if case.codes == ("silent",):
        assert watched.diagnoses == [], watched.output
        return
    assert len(watched.diagnoses) == 1, f"{[found.code for found in watched.diagnoses]}\n{watched.output}"
    (diagnosis,) = watched.diagnoses
    assert diagnosis.code in case.codes, diagnosis
    cause = diagnosis.cause_location
    assert cause is not None
    if case.line is not None:
        assert (cause.file, cause.line) == case.line, diagnosis
    if "proven" in case.words:
        assert diagnosis.grade == "proven", diagnosis
    if "cure" in case.words:
        assert any(treatment.proven for treatment in diagnosis.treatments), diagnosis
