"""The registry lists every rule under the evidence that it takes, and knows rules by name without loading them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchmedic.diagnose import catalogue, registry
from torchmedic.records import Diagnosis

RULES = Path(registry.__file__).parent / "rules"
FAMILIES = {
    name: (family, str(registry.__annotations__[name]).removeprefix("Family[").removesuffix("]"))
    for name, family in vars(registry).items()
    if isinstance(family, registry.Family) and name != "LAST"
}


def told(code: str, name: str) -> Diagnosis:
    return Diagnosis(code=code, name=name, severity="error", grade="proven", message="", cause="")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rule_takes_the_evidence_of_its_family(name: str) -> None:
    family, evidence = FAMILIES[name]
    for rule in family:
        check = registry.load(rule).check
        taken = next(hint for argument, hint in check.__annotations__.items() if argument != "return")
        assert evidence in str(taken).split(" | "), f"{rule} takes {taken} and is listed under {evidence}"


def test_every_rule_file_is_registered_once_and_called_like_its_rule() -> None:
    files = {path for path in RULES.rglob("*.py") if not path.name.startswith("_")}
    assert {RULES / (rule.replace(".", "/") + ".py") for rule in registry.ALL} == files
    names = {catalogue.read(rule).name.replace("-", "_"): rule.split(".")[-1] for rule in registry.ALL}
    assert all(name == module for name, module in names.items())
    assert len(names) == len(registry.ALL), "a name stands for one rule"
    assert len({catalogue.read(rule).code for rule in registry.ALL}) == len(registry.ALL)


def test_what_a_finding_means_for_the_run_is_known_by_its_name() -> None:
    """The families say what once was read off the digits of a code; these are the codes as they were."""
    for entry in catalogue.entries():
        diagnosis = told(entry.code, entry.name)
        compared = "TM712" <= entry.code <= "TM719" or entry.code in ("TM728", "TM732")  # ranks that go on
        assert registry.is_silent(diagnosis) == (entry.code.startswith(("TM6", "TM45")) or compared), entry.code
        assert registry.is_hang(diagnosis) == entry.code.startswith("TM5"), entry.code
        assert registry.is_fallback(diagnosis) == (entry.code == "TM900"), entry.code
    assert not registry.is_silent(told("TM699", "rule-of-a-later-version"))


def test_the_parent_need_not_load_a_rule_to_know_that() -> None:
    script = (
        "import sys; from torchmedic.diagnose import registry; from torchmedic.records import Diagnosis; "
        "assert registry.is_silent(Diagnosis(code='', name='growing-graph', severity='error', grade='proven', "
        "message='', cause='')); print([m for m in sys.modules if m == 'torch' or '.rules' in m])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_documentation_of_every_rule_has_a_short_cure() -> None:
    """A diagnosis gives it as advice where no treatment of the rule passed."""
    cures = {rule: catalogue.read(rule).cure for rule in registry.ALL if rule != registry.LAST[0]}
    assert {rule: cure for rule, cure in cures.items() if not 3 < len(cure) < 260} == {}
