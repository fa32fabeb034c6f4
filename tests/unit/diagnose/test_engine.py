"""The engine asks each rule once, and the second tier of the rules about memory only if the first has no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchmedic.diagnose import engine, registry
from torchmedic.diagnose.rule import Rule, RuleAnswer
from torchmedic.records import Diagnosis, Grade, Treatment

FIRST, SECOND = registry.EXHAUSTED[0], registry.OUT_OF_MEMORY[0]
Answers = dict[str, Grade]


def told(rule: str, grade: Grade) -> Diagnosis:
    advice = (Treatment(title="advice of its own", safety="edit"),)
    return Diagnosis(code=rule, name=rule, severity="error", grade=grade, message="", cause="", treatments=advice)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[str]]:
    """Rules that give some answers, and the names of those that were asked."""

    def replace(answers: Answers) -> list[str]:
        names: list[str] = []

        def load(name: str) -> Rule[Any]:
            def check(evidence: Any) -> Diagnosis | None:
                names.append(name)
                return told(name, answers[name]) if name in answers else None

            return Rule(name, name, check)

        monkeypatch.setattr(engine, "load", load)
        return names

    return replace


def test_every_rule_is_asked_once(asked: Callable[[Answers], list[str]]) -> None:
    names = asked({})
    assert engine.find(object(), registry.RAISED) is None
    assert names == list(registry.RAISED)


def test_the_second_tier_is_not_asked_once_the_first_has_answered(asked: Callable[[Answers], list[str]]) -> None:
    names = asked({FIRST: "possible", SECOND: "proven"})
    found = engine.ask(object(), registry.RAISED)
    assert found == told(FIRST, "possible"), "who is to blame says more than which limit was reached"
    assert not set(names) & set(registry.OUT_OF_MEMORY)
    assert set(registry.EXHAUSTED) <= set(names)


def test_other_rules_do_not_silence_the_second_tier(asked: Callable[[Answers], list[str]]) -> None:
    asked({"memory.pinned_memory_refused": "likely", SECOND: "proven"})
    assert engine.find(object(), registry.RAISED) == RuleAnswer(told(SECOND, "proven"))


def test_a_diagnosis_without_a_treatment_gets_the_cure_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Diagnosis(code="TM202", name="", severity="error", grade="proven", message="", cause="")
    monkeypatch.setattr(engine, "load", lambda name: Rule(name, name, lambda evidence: bare))
    evidence: Any = None

    found = engine.ask(evidence, registry.Family("numbers.log_of_zero_or_negative"))

    assert found is not None
    assert [(each.title.split()[0], each.proven) for each in found.treatments] == [("compute", False)]
