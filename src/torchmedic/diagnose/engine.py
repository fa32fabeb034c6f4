"""Ask the rules, keep the best-graded answer: one diagnosis per incident, the root and not its echoes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmedic.contained import report_fault
from torchmedic.diagnose.registry import load
from torchmedic.diagnose.rules.unknown import not_explained
from torchmedic.records import Diagnosis

_GRADES = ("proven", "likely", "possible")


def diagnose(evidence: Any, rules: Iterable[str]) -> Diagnosis:
    """The diagnosis of one incident; TM900 where no rule can bear a claim out."""
    return ask(evidence, rules) or not_explained(evidence)


def ask(evidence: Any, rules: Iterable[str]) -> Diagnosis | None:
    """The best-graded answer of some rules, if one of them has any.

    The order of the registry breaks ties. A rule that crashes is contained and counts as silent.
    """
    found: list[Diagnosis] = []
    for name in rules:
        try:
            diagnosis = load(name).check(evidence)
        except Exception as error:
            report_fault(f"diagnose.{name}", error)
            continue
        if diagnosis is not None:
            found.append(diagnosis)
            if diagnosis.grade == "proven":
                break
    return min(found, key=lambda diagnosis: _GRADES.index(diagnosis.grade), default=None)
