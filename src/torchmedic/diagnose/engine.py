"""Ask the rules, keep the best-graded answer: one diagnosis per incident, the root and not its echoes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from torchmedic.contained import report_fault
from torchmedic.diagnose import catalogue
from torchmedic.diagnose.registry import UNLESS, Family, load
from torchmedic.diagnose.rule import Draft, E, RuleAnswer
from torchmedic.diagnose.rules.cause_not_known import not_explained
from torchmedic.records import Diagnosis, Treatment

if TYPE_CHECKING:
    from torchmedic.evidence.exception import RaisedEvidence
    from torchmedic.evidence.numbers import NumbersEvidence
    from torchmedic.records.death import Death

Explained = TypeVar("Explained", bound="RaisedEvidence | NumbersEvidence | Death")

_GRADES = ("proven", "likely", "possible")


def diagnose(evidence: Explained, rules: Family[Explained]) -> Diagnosis:
    """The diagnosis of one incident; TM900 where no rule can bear a claim out."""
    return ask(evidence, rules) or not_explained(evidence)


def ask(evidence: E, rules: Family[E]) -> Diagnosis | None:
    """The best-graded answer of a family of rules; the first proven answer ends the search.

    The order of the family breaks ties. A rule that crashes is contained and counts as silent.
    """
    found = find(evidence, rules)
    return found.diagnosis if found is not None else None


def ask_each(evidence: E, rules: Family[E]) -> list[Diagnosis]:
    """The answer of every rule that has one."""
    return [found.diagnosis for rule in rules if (found := find(evidence, Family(rule))) is not None]


def find(evidence: E, rules: Family[E]) -> RuleAnswer | None:
    """Like `ask`, with the cures that are still to be tried."""
    found: dict[str, RuleAnswer] = {}
    for name in rules:
        if not found.keys().isdisjoint(UNLESS.get(name, ())):
            continue
        try:
            answer = load(name).check(evidence)
            answer = answer.done() if isinstance(answer, Draft) else answer
        except Exception as error:
            report_fault(f"diagnose.{name}", error)
            continue
        if answer is not None:
            answer = answer if isinstance(answer, RuleAnswer) else RuleAnswer(answer)
            found[name] = _with_advice(name, answer)
            if found[name].diagnosis.grade == "proven":
                break
    return min(found.values(), key=lambda each: _GRADES.index(each.diagnosis.grade), default=None)


def _with_advice(rule: str, answer: RuleAnswer) -> RuleAnswer:
    """The cure of the rule's documentation, in the place of a cure that was tried and did not pass."""
    if answer.plan is not None or answer.diagnosis.treatments:
        return answer
    advice = (Treatment(title=catalogue.read(rule).cure, safety="edit"),)
    return RuleAnswer(msgspec.structs.replace(answer.diagnosis, treatments=advice))
