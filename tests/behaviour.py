"""A pytest plugin that stores what every test's runs were told, and a comparison of two such stores.

    TORCHMEDIC_BEHAVIOUR=before.jsonl python -m pytest -p behaviour -m 'not gpu' tests
    python tests/behaviour.py before.jsonl after.jsonl

For each diagnosis of each run: code, severity, grade, line of the cause, and number of proven cures. Use it to show
that a change of structure changes no verdict.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_VARIABLE = "TORCHMEDIC_BEHAVIOUR"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Read the run folders of a test before pytest removes them."""
    target = os.environ.get(_VARIABLE)
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if target and isinstance(folder, Path):
        runs = {str(path.relative_to(folder)): _verdicts(path) for path in _results(folder)}
        name = f"{item.path.name}::{item.name}"
        with open(target, "a") as file:
            file.write(json.dumps({"test": name, "runs": runs}) + "\n")
    return (yield)


def _results(folder: Path) -> list[Path]:
    """The reports in a folder; where there is none, the diagnoses that single processes wrote."""
    reports = sorted(folder.glob("**/report.json"))
    return reports or sorted(folder.glob("**/diagnosis-*.json"))


def _verdicts(path: Path) -> list[list[Any]]:
    try:
        content = json.loads(path.read_bytes())
        return sorted(map(_verdict, content.get("diagnoses", [content])), key=str)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        return [[type(error).__name__]]


def _verdict(diagnosis: dict[str, Any]) -> list[Any]:
    causes = [place for place in diagnosis["locations"] if place["role"] == "cause"]
    proven = sum(treatment["proven"] for treatment in diagnosis["treatments"])
    return [
        diagnosis["code"],
        diagnosis["severity"],
        diagnosis["grade"],
        causes[0]["line"] if causes else None,
        proven,
    ]


def _read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in Path(path).read_text().splitlines():
        record = json.loads(line)
        found[record["test"]] = record["runs"]
    return found


def main(before: str, after: str) -> int:
    """Print every test whose verdicts differ; the exit status is 1 if there is one."""
    old, new = _read(before), _read(after)
    different = [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    for name in different:
        print(name, f"  before: {old[name]}", f"  after:  {new[name]}", sep="\n")
    missing, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    print(f"{len(old.keys() & new.keys())} tests in both, {len(different)} differ")
    print(f"only before: {missing}\nonly after: {added}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
