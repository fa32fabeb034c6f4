"""Where an optimizer was built, and where its rate is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmedic.source.lookup import optimizers
from torchmedic.source.lookup.named_numbers import value_written_at
from torchmedic.source.lookup.optimizers import Construction, advanced_at, built_at, construction
from torchmedic.source.spots import Place
from torchmedic.source.syntax import syntax_tree


class Own(torch.optim.SGD):
    """An optimizer of the user's own, which notes who builds it."""

    seen: Construction | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        type(self).seen = construction(sys._getframe(), type(self))
        super().__init__(*args, **options)


def test_the_call_and_its_value() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Own(
        [
            {"params": [weight], "lr": 0.5},
        ],
        lr=0.1,
    )
    assert Own.seen is not None
    assert Own.seen.code is sys._getframe().f_code
    assert Own.seen.is_direct
    whole = built_at([], optimizer, "cause", "", by=Own.seen)
    part = built_at([], optimizer, "cause", "", by=Own.seen, value=0.5)
    assert whole is not None
    assert part is not None
    assert part.line == whole.line + 2


def test_a_rate_that_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'CONFIG = {"steps": 6.5, "lr": 6.5}\ndef train(rate=2.5, momentum=7.5):\n    pass\nlr = 3.5\nLR = 3.5\n'
    (tmp_path / "config_of_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("config_of_test")
    found = {value: value_written_at(value, None, "") for value in (6.5, 2.5, 7.5, 3.5)}
    lines = {value: place.line for value, place in found.items() if place is not None}
    assert lines == {6.5: 1, 2.5: 2}  # 7.5 is no rate, 3.5 is written twice
    sys.modules.pop("config_of_test")


def test_the_line_that_has_a_schedule_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text('config = {"scheduler": 1,\n          "interval": "step"}\ntrainer.fit(net)\nscheduler.step()\n')
    file = str(script)
    monkeypatch.setattr(optimizers, "user_trees", lambda: iter([(file, syntax_tree(file))]))
    assert advanced_at([], None, Place(file, 3)) == Place(file, 2)
    assert advanced_at([], None, Place(file, 4)) == Place(file, 4)
