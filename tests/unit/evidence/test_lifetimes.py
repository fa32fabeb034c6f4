"""Whether what holds memory is made anew before it holds much."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.evidence.leaks.lifetimes import Lifetime
from torchmedic.observe.heap.walk import Held

METERS = """
class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0

    def update(self, value, count):
        self.sum += value * count

"""
KEPT = """
meters = {"loss": Meter()}
for epoch in range(9):
    for x in data:
        loss = step(x)
        meters["loss"].update(loss, x.size(0))
"""
ANEW = """
for epoch in range(9):
    meters = {"loss": Meter()}
    for x in data:
        loss = step(x)
        meters["loss"].update(loss, x.size(0))
"""
REMOVED = """
meters = {"loss": Meter()}
for epoch in range(9):
    for x in data:
        loss = step(x)
        meters["loss"].update(loss, x.size(0))
    meters.pop("loss")
"""


@pytest.mark.parametrize(("loop", "passes"), [(KEPT, False), (ANEW, True), (REMOVED, True)])
def test_a_meter_in_a_dict_lives_as_long_as_the_dict(tmp_path: Path, loop: str, passes: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(METERS + loop)
    held = Held("meters['loss'].sum", "sum", "age", 0, str(file), 0, owners=("Meter", "object"))
    assert Lifetime(held, [], [str(file)]).has_passing_owner is passes
