"""What a rule is, and how it writes its diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from torchmedic.records import Diagnosis, Grade, Location, Safety, Severity, Treatment


class Rule(msgspec.Struct, frozen=True):
    """One bad thing: its code, its name, and the check that proves it.

    A rule is one file. Its module docstring is what `torchmedic explain CODE` prints: what happened, why, how to cure
    it. The check takes the kind of evidence under which the registry lists the rule, and returns None unless the
    evidence bears the claim out.
    """

    code: str
    name: str
    check: Callable[[Any], Diagnosis | None]


class Draft:
    """A diagnosis in the making, so that a rule reads as message, places, evidence, advice."""

    def __init__(self, code: str, name: str, grade: Grade, message: str, cause: str) -> None:
        self._head = (code, name, grade, message, cause)
        self._locations: list[Location] = []
        self._evidence: list[str] = []
        self._treatments: list[Treatment] = []

    def at(self, *locations: Location | None) -> Draft:
        """Add places, the cause first. None and repetitions of a line are left out."""
        for location in locations:
            if location is not None and not any(
                (known.file, known.line) == (location.file, location.line) for known in self._locations
            ):
                self._locations.append(location)
        return self

    def because(self, *facts: str) -> Draft:
        """Add evidence; an empty text is left out."""
        self._evidence.extend(fact for fact in facts if fact)
        return self

    def help(self, title: str, *, patch: str = "", safety: Safety = "edit") -> Draft:
        """Add advice that was not tried."""
        self._treatments.append(Treatment(title=title, patch=patch, safety=safety))
        return self

    def treat(self, *treatments: Treatment | None) -> Draft:
        """Add treatments that were tried; None is one that did not pass."""
        self._treatments.extend(treatment for treatment in treatments if treatment is not None)
        return self

    @property
    def code(self) -> str:
        return self._head[0]

    @property
    def has_place(self) -> bool:
        return bool(self._locations)

    @property
    def has_treatment(self) -> bool:
        return bool(self._treatments)

    def done(self, *, step: int | None = None, rank: int = 0, severity: Severity = "error") -> Diagnosis:
        code, name, grade, message, cause = self._head
        return Diagnosis(
            code=code,
            name=name,
            severity=severity,
            grade=grade,
            message=message,
            cause=cause,
            step=step,
            rank=rank,
            locations=tuple(self._locations),
            evidence=tuple(self._evidence),
            treatments=tuple(self._treatments),
        )
