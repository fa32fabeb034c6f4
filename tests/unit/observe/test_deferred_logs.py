"""The line that logged a value which Lightning exchanges later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from torchmedic.observe.inside import deferred_logs

SOURCE = """
class Lit:
    def shared(self, stage):
        self.log(f"{stage}_cls", 1)
        self.log(f"{stage}_box", 2)
    def on_train_epoch_end(self):
        self.log("norm", 3)
    def on_test_end(self):
        self.log(self.name, 4)
"""


@pytest.mark.parametrize(
    ("name", "hook", "line"),
    [
        ("norm", "on_train_epoch_end", 7),
        ("val_box", "validation_step", 5),
        ("best", "on_test_end", 9),  # a name that is computed: the only call of its hook
        ("best", "validation_step", None),
    ],
)
def test_the_call_is_found_by_its_name_or_its_hook(
    monkeypatch: pytest.MonkeyPatch, name: str, hook: str, line: int | None
) -> None:
    def trees() -> Iterator[tuple[str, Any]]:
        yield "lit.py", ast.parse(SOURCE)

    monkeypatch.setattr(deferred_logs, "user_trees", trees)
    found = deferred_logs._line_of(name, hook)
    assert (found.line if found is not None else None) == line
