"""The scripts on the pages of docs/diagnoses, by what they need: nothing, a card, or a machine that is stood in for.

A fence says `python fails` or `python passes`, then perhaps `gpu` for a script that needs a real card, `on` and the
name of one of `machines.MACHINES`, or `ranks` and the number of ranks of a job, which `test_rank_jobs.py` runs; `gpus`
and a number after that if it needs several cards.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from machines import placed_on
from running import Finished, marked_line

PAGES = Path(__file__).parents[1] / "docs" / "diagnoses"
HANGS = "TM5"  # run by test_hangs.py, many side by side, and by test_hangs_cuda.py
_CARDS = list(Path("/proc/driver/nvidia/gpus").glob("*"))
FENCE = re.compile(r"^```python (fails|passes)([^\n]*)\n(.*?)^```$", re.M | re.S)


def kinds(page: Path) -> set[str]:
    """Whether a page has scripts that fail, and such that pass."""
    return {kind for kind, _, _ in FENCE.findall(page.read_text())}


def scripts(kind: str, *, gpu: bool = False, hangs: bool = False) -> list[object]:
    """All scripts of a kind as parameters of a test: those that need a card, or those that do not."""
    found: list[object] = []
    for page in sorted(PAGES.glob("TM*.md")):
        code = page.name.split("-")[0]
        if code.startswith(HANGS) is not hangs:
            continue
        blocks = [
            (words.split(), body) for kind_found, words, body in FENCE.findall(page.read_text()) if kind_found == kind
        ]
        for number, (words, body) in enumerate(blocks):
            if ("gpu" in words[:1]) is gpu and words[:1] != ["ranks"]:
                source = placed_on(" ".join(words[1:]), body) if words[:1] == ["on"] else body
                slow = pytest.mark.slow if "import lightning" in body else ()  # seconds for the import alone
                found.append(pytest.param(code, source, id=f"{code}-{number}", marks=slow))
    return found


def rank_scripts(kind: str) -> list[object]:
    """All scripts of a kind that are jobs of several ranks, as parameters of a test: code, number of ranks, source."""
    found: list[object] = []
    for page in sorted(PAGES.glob("TM*.md")):
        code = page.name.split("-")[0]
        for number, (kind_found, text, body) in enumerate(FENCE.findall(page.read_text())):
            words = text.split()
            if kind_found == kind and words[:1] == ["ranks"]:
                gpus = int(words[3]) if words[2:3] == ["gpus"] else 0
                missing = pytest.mark.skipif(len(_CARDS) < gpus, reason=f"needs {gpus} GPUs")
                found.append(pytest.param(code, int(words[1]), body, id=f"{code}-{number}", marks=missing))
    return found


def check_failure(code: str, source: str, finished: Finished) -> None:
    """A script has failed with its code, at its marked line."""
    diagnosis = finished.only
    assert diagnosis.code == code, finished.stderr
    assert diagnosis.cause_location is not None, finished.stderr
    where = (diagnosis.cause_location.file, diagnosis.cause_location.line)
    assert where == ("train.py", marked_line(source)), finished.stderr
    is_printed = diagnosis.severity != "note" and not diagnosis.in_traceback
    assert (f"[{code}]" in finished.stderr) is is_printed


def check_health(finished: Finished) -> None:
    assert finished.returncode == 0, finished.stderr
    assert finished.report.diagnoses == ()
