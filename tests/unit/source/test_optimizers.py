"""Where an optimizer was built, and where its rate is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmedic.source.live_frames import place
from torchmedic.source.lookup import named_numbers, optimizers
from torchmedic.source.lookup.named_numbers import set_and_used
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
    found = {value: set_and_used(value, None, "") for value in (6.5, 2.5, 7.5, 3.5)}
    lines = {value: places[0].line for value, places in found.items() if places}
    assert lines == {6.5: 1, 2.5: 2}  # 7.5 is no rate, 3.5 is written twice
    sys.modules.pop("config_of_test")


def test_the_name_that_is_used_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["lr = 0.5", "def build(lr_actor=8.5,", "          lr_critic=8.5):", "    return make(lr=lr_critic)"]
    lines += ["spelled = make(lr=0.5)", "peak = base * batch / 256", "computed = make(lr=peak)"]
    (tmp_path / "rates_of_test.py").write_text("\n".join(lines))
    file = str(tmp_path / "rates_of_test.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(named_numbers, "loaded_files", lambda: [file])
    use = place("cause", file, 4, "used here")
    assert [(each.role, each.line) for each in set_and_used(8.5, use, "")] == [("cause", 4), ("origin", 3)]
    blamed = set_and_used(8.5, use, "", blames_name=True)
    assert [(each.role, each.line) for each in blamed] == [("cause", 3), ("origin", 4)]
    spelled = place("cause", file, 5, "used here")
    assert set_and_used(0.5, spelled, "") == (spelled,)  # nothing else is looked for
    assert [each.line for each in set_and_used(4.0, place("cause", file, 7, "used here"), "")] == [7, 6]


def test_the_line_that_has_a_schedule_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text('config = {"scheduler": 1,\n          "interval": "step"}\ntrainer.fit(net)\nscheduler.step()\n')
    file = str(script)
    monkeypatch.setattr(optimizers, "user_trees", lambda: iter([(file, syntax_tree(file))]))
    assert advanced_at([], None, Place(file, 3)) == Place(file, 2)
    assert advanced_at([], None, Place(file, 4)) == Place(file, 4)
