"""The branch of a consumer that leaves `task_done()` out."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.diagnose.rules.hangs._unmarked_items import left_out
from torchmedic.records.inside import PyFrame

SKIPS = """
def run(queue):
    while True:
        item = queue.get()
        if item is None:
            continue
        queue.task_done()
"""
NEVER = """
def run(queue):
    while True:
        item = queue.get()
        print(item)
"""
FINALLY = """
def run(queue):
    while True:
        item = queue.get()
        try:
            if item is None:
                continue
        finally:
            queue.task_done()
"""
MARKED = """
def run(queue):
    while True:
        item = queue.get()
        if item is None:
            queue.task_done()
            continue
        for part in item:
            if part:
                continue
        queue.task_done()
"""


@pytest.mark.parametrize(("source", "line"), [(SKIPS, 6), (NEVER, 4), (FINALLY, None), (MARKED, None)])
def test_the_line_that_goes_on_is_named(tmp_path: Path, source: str, line: int | None) -> None:
    file = tmp_path / "writer.py"
    file.write_text(source)
    found = left_out(PyFrame(file=str(file), line=4, function="run"))
    assert (found.line if found is not None else None) == line
