"""Which source lines of a diagnosis are shown together (one frame per file), and the lines that a patch changes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from torchmedic.records import Diagnosis, Location

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled lines of one file, by line number. `head` is the place that the title of the frame names."""

    head: Location
    places: tuple[Location, ...]
    primary: bool = False


def primary_place(diagnosis: Diagnosis) -> Location | None:
    """The cause, or else the first location."""
    return diagnosis.cause_location or next(iter(diagnosis.locations), None)


def frames(diagnosis: Diagnosis) -> list[Frame]:
    """The frames of a diagnosis; the first holds the primary place."""
    primary = primary_place(diagnosis)
    if primary is None:
        return []
    rest = [place for place in diagnosis.locations if place is not primary]
    same = [place for place in rest if place.file == primary.file]
    others = [place for place in rest if place.file != primary.file]
    found = [Frame(head=primary, places=_by_line([primary, *same]), primary=True)]
    for _, group in itertools.groupby(others, key=lambda place: place.file):
        places = list(group)
        found.append(Frame(head=places[0], places=_by_line(places)))
    return found


def _by_line(places: list[Location]) -> tuple[Location, ...]:
    return tuple(sorted(places, key=lambda place: place.line))


class Change(msgspec.Struct, frozen=True):
    """A line that is removed or added, with its number in the old or the new file."""

    sign: Literal["-", "+"]
    number: int
    text: str


class Hunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive lines of one file. If no line is removed, the new lines come after line `start`."""

    file: str
    start: int
    removed: tuple[Change, ...] = ()
    added: tuple[Change, ...] = ()


def hunks(patch: str) -> Iterator[Hunk]:
    """The hunks of a unified diff without context lines; other lines are skipped."""
    lines = iter(patch.splitlines())
    file = ""
    for line in lines:
        if line.startswith("--- "):
            file = line[4:].split("\t")[0]
            continue
        match = _HUNK.match(line)
        if match is None:
            continue
        old, new = int(match[1]), int(match[3])
        left = [int(match[2] or 1), int(match[4] or 1)]
        removed: list[Change] = []
        added: list[Change] = []
        while any(left) and (line := next(lines, "@")) and line[0] in "-+":
            if line[0] == "-":
                removed.append(Change("-", old + len(removed), line[1:]))
            else:
                added.append(Change("+", new + len(added), line[1:]))
            left[line[0] == "+"] -= 1
        yield Hunk(file=file, start=old, removed=tuple(removed), added=tuple(added))
