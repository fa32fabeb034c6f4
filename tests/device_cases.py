"""The scripts in `integration/device_cases`, for the device that a test has: `meta` everywhere, `cuda` on a card.

A section begins with `#### name expected`. What is expected is a code, then words: `proven` for its grade, `cure` for a
treatment that was proven on the step, `cuda` where only a card can fail this way; or `silent`. `# says:` is followed by
words that the diagnosis must hold, `# on:` by a machine that is stood in for, `# env:` by a variable. The line to blame
ends with `# <- cause`, the one that it goes back to with `# <- origin`. A section may hold further files after
`# file: name`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from machines import placed_on
from running import Finished

_FOLDER = Path(__file__).parent / "integration" / "device_cases"
_SECTION = re.compile(r"^#### (\S+) (.*)\n", re.M)
_FILE = re.compile(r"^# file: (\S+)\n", re.M)
_SAYS = re.compile(r"^# says: (.*)$", re.M)
_ON = re.compile(r"^# on: (.*)$", re.M)
_ENV = re.compile(r"^# env: (\w+)=(.*)$", re.M)


class Case(NamedTuple):
    code: str
    words: frozenset[str]
    files: dict[str, str]

    @property
    def script(self) -> str:
        source = self.files["train.py"]
        machine = _ON.search(source)
        return source if machine is None else placed_on(machine[1], source)

    @property
    def environment(self) -> dict[str, str]:
        return dict(_ENV.findall(self.files["train.py"]))

    def marked(self, mark: str) -> list[tuple[str, int]]:
        return [
            (name, number)
            for name, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if line.rstrip().endswith(mark)
        ]


def cases(name: str, device: str) -> list[object]:
    """The sections of a file as parameters of a test."""
    found: list[object] = []
    parts = _SECTION.split((_FOLDER / f"{name}.txt").read_text().replace('"DEVICE"', f'"{device}"'))
    for title, expected, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        code, *words = expected.split()
        if "cuda" in words and device != "cuda":
            continue
        first, *rest = _FILE.split(text)
        files = {"train.py": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
        found.append(pytest.param(Case(code, frozenset(words), files), id=title))
    return found


def check(case: Case, finished: Finished) -> None:
    """Compare a run with what its script says of itself."""
    if case.code == "silent":
        assert finished.returncode == 0, finished.stderr
        assert finished.report.diagnoses == (), finished.stderr
        return
    diagnosis = finished.only
    assert diagnosis.code == case.code, finished.stderr
    assert diagnosis.cause_location is not None
    assert [(diagnosis.cause_location.file, diagnosis.cause_location.line)] == case.marked("# <- cause")
    origins = [(place.file, place.line) for place in diagnosis.locations if place.role == "origin"]
    assert set(case.marked("# <- origin")) <= set(origins), finished.stderr
    if "proven" in case.words:
        assert diagnosis.grade == "proven", finished.stderr
    if "cure" in case.words:
        assert any(treatment.proven for treatment in diagnosis.treatments), finished.stderr
    said = "\n".join(
        [
            diagnosis.message,
            diagnosis.cause,
            *diagnosis.evidence,
            *(treatment.title for treatment in diagnosis.treatments),
            *(place.label for place in diagnosis.locations),
        ]
    )
    for words in _SAYS.findall(case.files["train.py"]):
        assert words in said, finished.stderr
