"""Which line made a bad value, while code is run line by line."""

from __future__ import annotations

import linecache
import math
from pathlib import Path
from typing import Any

import pytest

from torchmedic.evidence.bad_value_lines import Line, Watch


def line_of(tmp_path: Path, source: str, name: str = "x", **given: Any) -> Line | None:
    """The line of a script that made a variable bad."""
    file = tmp_path / "prepare.py"
    file.write_text(source)
    linecache.checkcache(str(file))
    names: dict[str, Any] = {"math": math, **given}
    watch = Watch()
    with watch:
        exec(compile(source, str(file), "exec"), names)
    return watch.line_of(names[name])


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("a = [1.0]\nx = [v * math.inf for v in a]\ny = x\n", 2),
        ("a = [math.nan]\nb = [v + 1 for v in a]\nx = b\n", 1),
        ("def f(v):\n    w = v * math.inf\n    return [w]\n\nx = f(2.0)\n", 2),
        ("x = []\nfor v in (1.0, 2.0, 3.0):\n    w = math.inf if v == 2 else v\n    x.append(w)\nn = 1\n", 3),
        ("a = [math.nan]\na = [0.0 for v in a]\nx = [v - math.inf for v in a]\nn = 1\n", 3),
    ],
    ids=["made-here", "passed-on", "in-a-function", "put-into-a-list", "repaired-before"],
)
def test_a_bad_value_comes_from_the_line_that_made_it(tmp_path: Path, source: str, line: int) -> None:
    found = line_of(tmp_path, source)
    assert found is not None
    assert (found.line, found.is_stored) == (line, False)


def test_what_was_bad_before_is_only_read(tmp_path: Path) -> None:
    rows = [[float(i)] for i in range(500)]
    rows[300] = [math.nan]
    found = line_of(tmp_path, "x = rows[300]\nn = 1\n", rows=rows)
    assert found is not None
    assert (found.line, found.name, found.is_stored) == (1, "rows", True)


def test_a_repaired_array_is_not_bad(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    source = "x = numpy.zeros(3)\nx[1] = math.nan\nx[1] = 0\nn = 1\n"
    assert line_of(tmp_path, source, numpy=numpy) is None
