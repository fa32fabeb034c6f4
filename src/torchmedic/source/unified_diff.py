"""A unified diff, as people and assistants write it, applied to the text of files.

Line numbers in such diffs are often wrong, so a hunk is found by the lines that it removes and keeps. Its numbers
decide only between several places where the lines fit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@|@@")


class BadPatch(ValueError):
    """The text is no diff, or does not fit its file."""


class Hunk(NamedTuple):
    """Consecutive lines of one file, before and after. `start` is the line number that the diff gives, or 0."""

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


def parse(patch: str) -> dict[str, list[Hunk]]:
    """The hunks by the name of their file, as it is before the change.

    Raises:
        BadPatch: There is no hunk in the text, or a hunk without a file.
    """
    found: dict[str, list[Hunk]] = {}
    file = ""
    start: int | None = None
    before: list[str] = []
    after: list[str] = []

    def close() -> None:
        nonlocal start
        if start is not None and (before or after):
            if not file:
                raise BadPatch("the patch names no file: a line `--- train.py` is missing")
            found.setdefault(file, []).append(Hunk(start, tuple(before), tuple(after)))
        start = None
        before.clear()
        after.clear()

    lines = patch.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ "):
            close()
            file = _name(line[4:])
        elif line.startswith("+++ ") and start is None:
            continue
        elif (match := _HUNK.match(line)) is not None:
            close()
            start = int(match[1] or 0)
        elif start is not None and not line.startswith("\\"):
            sign, text = (line[0], line[1:]) if line else (" ", "")
            if sign not in "-+ ":
                close()
                continue
            if sign != "+":
                before.append(text.rstrip())
            if sign != "-":
                after.append(text.rstrip())
    close()
    if not found:
        raise BadPatch("the patch holds no hunk (`@@ -3 +3 @@`) of a unified diff")
    return found


def _name(text: str) -> str:
    name = text.split("\t", maxsplit=1)[0].strip()
    return name[2:] if name.startswith(("a/", "b/")) else name


def applied(lines: Sequence[str], hunks: Sequence[Hunk]) -> list[str]:
    """The lines of a file after the hunks, without line ends.

    Raises:
        BadPatch: A hunk does not fit, or fits in several places equally well.
    """
    result = list(lines)
    shift = 0
    for hunk in hunks:
        at = _place(result, hunk, shift)
        result[at : at + len(hunk.before)] = hunk.after
        shift += len(hunk.after) - len(hunk.before)
    return result


def _place(lines: Sequence[str], hunk: Hunk, shift: int) -> int:
    size = len(hunk.before)
    wanted = hunk.start - 1 + shift
    if not size:
        if not 0 <= wanted + 1 <= len(lines):
            raise BadPatch(f"there is no line {hunk.start} to add lines after")
        return wanted + 1
    stripped = [line.rstrip() for line in lines]
    places = [at for at in range(len(lines) - size + 1) if tuple(stripped[at : at + size]) == hunk.before]
    if not places:
        raise BadPatch(f"the file has no such lines: {hunk.before[0].strip()!r}, ...")
    nearest = sorted(places, key=lambda at: abs(at - wanted))
    if len(places) > 1 and (not hunk.start or abs(nearest[0] - wanted) == abs(nearest[1] - wanted)):
        raise BadPatch(
            f"the lines of a hunk stand in {len(places)} places of the file: {hunk.before[0].strip()!r}, ..."
        )
    return nearest[0]


def old_numbers(before: Sequence[str], after: Sequence[str]) -> list[int]:
    """For every line of the new text, the number of the line of the old text whose place it has taken, from 1."""
    found: list[int] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for offset in range(j2 - j1):
            last = max(i1, i2 - 1) if kind != "insert" else i1
            found.append(min(i1 + offset, last, max(len(before) - 1, 0)) + 1)
    return found
