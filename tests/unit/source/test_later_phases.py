"""Conditions on a counter, and lines that run only under a condition."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from torchmedic.source.lookup import later_phases


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("if step >= WARM: loss = loss + aux", True),
        ("weight = 0.0 if step < 40 else 1.0", True),
        ("self.seen += 1; on = self.seen > 40", True),
        ("if self.current_epoch > 3: self.thaw()", True),
        ("if step % 10 == 0: print(step)", False),
        ("if step == 0: print(step)", False),
        ("if step >= 100: break", False),
        ("if loss < best: best = loss", False),
    ],
)
def test_a_condition_on_a_counter(monkeypatch: pytest.MonkeyPatch, line: str, expected: bool) -> None:
    tree = ast.parse(f"for step in range(200):\n    {line}\n")
    monkeypatch.setattr(later_phases, "user_trees", lambda: [("train.py", tree)])
    assert later_phases.compares_counter() is expected


def test_a_line_under_a_condition(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def f(a, on):\n    if on:\n        a = 1\n    if self.training:\n        a = 2\n    return a\n")
    assert [later_phases.is_conditional(str(file), line) for line in (3, 5, 6)] == [True, False, False]
