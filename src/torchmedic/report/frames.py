"""Which source lines of a diagnosis are shown together: one frame per file, that of the cause first."""

from __future__ import annotations

import itertools

import msgspec

from torchmedic.records import Diagnosis, Location


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled lines of one file, by line number. `head` is the place that the title of the frame names."""

    head: Location
    places: tuple[Location, ...]
    primary: bool = False


def frames(diagnosis: Diagnosis) -> list[Frame]:
    """The frames of a diagnosis; the first holds the cause, or else the first location."""
    primary = diagnosis.cause_location or next(iter(diagnosis.locations), None)
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
