"""What a rule is, and how it writes its diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from torchmedic.records import Diagnosis, Grade, Location, Role, Safety, Severity, Treatment

if TYPE_CHECKING:
    from torchmedic.detect.loop.incident import LoopIncident
    from torchmedic.evidence.loop import LoopEvidence
    from torchmedic.evidence.memory.cures.forked import TrialPlan


class RuleAnswer(NamedTuple):
    """A diagnosis, and the cures that are to be tried for real once all that it was made from has gone."""

    diagnosis: Diagnosis
    plan: TrialPlan | None = None


class Evidence(Protocol):
    """What every kind of evidence offers, beside what only its own rules read.

    The number of the step is not called `step`: some kinds of evidence have a `step` that can be replayed.
    """

    @property
    def step_number(self) -> int | None: ...

    @property
    def rank(self) -> int: ...


class Locatable(Protocol):
    """A frame, a spot, an origin."""

    def location(self, role: Role, label: str) -> Location: ...


E = TypeVar("E", bound=Evidence)
Incident = TypeVar("Incident", bound="LoopIncident")
E_contra = TypeVar("E_contra", bound=Evidence, contravariant=True)
Answer: TypeAlias = "Draft | Diagnosis | RuleAnswer | None"  # the engine ends a draft
Check: TypeAlias = Callable[[E_contra], Answer]


class Rule(msgspec.Struct, Generic[E_contra], frozen=True):
    """One bad thing: its code, its name, and the check that proves it.

    A rule is one file. Its module docstring is what `torchmedic explain CODE` prints: what happened, why, how to cure
    it. The check takes the kind of evidence under which the registry lists the rule, and returns None unless the
    evidence bears the claim out. A rule that takes two kinds of evidence may be listed under both.
    """

    code: str
    name: str
    check: Check[E_contra]

    def draft(self, evidence: E_contra, grade: Grade, message: str = "", cause: str = "") -> Draft:
        """Begin the diagnosis of this rule, in the step and on the rank of the evidence.

        Long texts are set as attributes of the draft: `draft.message = ...`, `draft.cause = ...`.
        """
        return Draft(self.code, self.name, grade, message, cause, step=evidence.step_number, rank=evidence.rank)


def rule(code: str, name: str) -> Callable[[Check[E_contra]], Rule[E_contra]]:
    """Make a rule of a check: in its module, `check` is then the rule, and `check.draft` begins the diagnosis."""
    return lambda check: Rule(code, name, check)


def loop_rule(
    code: str, name: str, kind: type[Incident]
) -> Callable[[Callable[[LoopEvidence, Incident], Answer]], Rule[LoopEvidence]]:
    """Make a rule of a check that is asked about one kind of incident of the loop."""

    def bound(check: Callable[[LoopEvidence, Incident], Answer]) -> Rule[LoopEvidence]:
        def asked(evidence: LoopEvidence) -> Answer:
            return check(evidence, evidence.incident) if isinstance(evidence.incident, kind) else None

        return Rule(code, name, asked)

    return bound


class Draft:
    """A diagnosis in the making, so that a rule reads as message, places, evidence, advice."""

    def __init__(
        self, code: str, name: str, grade: Grade, message: str, cause: str, *, step: int | None = None, rank: int = 0
    ) -> None:
        self.code = code
        self._name = name
        self._grade: Grade = grade
        self.message = message
        self.cause = cause
        self._step = step
        self._rank = rank
        self._severity: Severity = "error"
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

    def mark(self, place: Locatable | None, role: Role, label: str) -> Draft:
        """Add a place that may not be known."""
        return self.at(place.location(role, label) if place is not None else None)

    def about(self, rank: int | None = None, *, step: int | None = None) -> Draft:
        """Name the rank or the step that is meant, where the evidence covers several."""
        self._rank = self._rank if rank is None else rank
        self._step = self._step if step is None else step
        return self

    def rated(self, severity: Severity) -> Draft:
        """Say how bad it is, where it is no error."""
        self._severity = severity
        return self

    def because(self, *facts: str) -> Draft:
        """Add evidence; an empty text is left out."""
        self._evidence.extend(fact for fact in facts if fact)
        return self

    def help(self, title: str, *, patch: str = "", safety: Safety = "edit") -> Draft:
        """Add advice that was not tried."""
        self._treatments.append(Treatment(title=title, patch=patch, safety=safety))
        return self

    def treat(self, *treatments: Treatment | None, otherwise: str = "") -> Draft:
        """Add treatments that were tried; None is one that did not pass. `otherwise` is advice where none passed."""
        passed = [treatment for treatment in treatments if treatment is not None]
        self._treatments.extend(passed)
        return self if passed or not otherwise else self.help(otherwise)

    @property
    def has_place(self) -> bool:
        return bool(self._locations)

    @property
    def has_treatment(self) -> bool:
        return bool(self._treatments)

    @property
    def has_cure(self) -> bool:
        """Whether a treatment passed."""
        return any(treatment.proven for treatment in self._treatments)

    def done(self, *, step: int | None = None, severity: Severity | None = None) -> Diagnosis:
        """End the draft, as the engine does. `step` is the one that is meant, where evidence covers several steps."""
        assert self.message, self.code
        return Diagnosis(
            code=self.code,
            name=self._name,
            severity=severity or self._severity,
            grade=self._grade,
            message=self.message,
            cause=self.cause,
            step=self._step if step is None else step,
            rank=self._rank,
            locations=tuple(self._locations),
            evidence=tuple(self._evidence),
            treatments=tuple(self._treatments),
        )
