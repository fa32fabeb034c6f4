"""The examples of docs/api.md and docs/integrations.md run as they stand there.

A fence says `python run`, then perhaps the code that must be found, and `needs` with a package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import run_plain

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```python run(?: (TM\d+))?(?: needs (\w+))?\n(.*?)^```$", re.M | re.S)


def _examples() -> list[object]:
    return [
        pytest.param(code, package, source, id=f"{name}-{number}", marks=pytest.mark.slow if package else ())
        for name in ("api", "integrations")
        for number, (code, package, source) in enumerate(FENCE.findall((DOCS / f"{name}.md").read_text()))
    ]


@pytest.mark.parametrize(("code", "package", "source"), _examples())
def test_an_example_runs(tmp_path: Path, code: str, package: str, source: str) -> None:
    if package:
        pytest.importorskip(package)
    finished = run_plain(tmp_path, source)

    is_caught = package != "accelerate"
    assert (finished.returncode == 0) is is_caught, finished.stderr
    reports = [json.loads(path.read_text()) for path in tmp_path.rglob("report.json")]
    assert [found["code"] for report in reports for found in report["diagnoses"]] == ([code] if code else [])
    assert (f"[{code}]" in finished.stderr) is bool(code), finished.stderr
