"""Loops that have passed what would end them, by what was read in several looks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from torchmedic.observe.inside.loops import Look, places_of, prints_of, view

LOOP = """def run(note):
    value, goal, rounds = 0.0, {goal}, 0
    while {test}:
        value += {step}
{more}        note()
"""


def looked_at(folder: Path, source: str, looks: int = 5) -> Any:
    """What is seen of the loop of a script after some rounds."""
    path = folder / "script.py"
    path.write_text(source)
    seen: list[Look] = []
    found: list[Any] = []

    class Enough(Exception):
        pass

    def note() -> None:
        frame: FrameType | None = sys._getframe(1)
        assert frame is not None
        seen.append(Look(places_of([frame]), prints_of([frame])))
        if len(seen) == looks:
            found.append(view(seen, [frame]))
            raise Enough

    space: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, str(path), "exec"), space)
    with pytest.raises(Enough):
        space["run"](note)
    return found[0]


@pytest.mark.parametrize(
    ("test", "step", "goal"), [("value != goal", 0.1, 0.05), ("value < goal", -1, 3), ("goal >= value", -2, 3)]
)
def test_two_sides_that_move_apart(tmp_path: Path, test: str, step: float, goal: float) -> None:
    loop = looked_at(tmp_path, LOOP.format(test=test, step=step, goal=goal, more=""))
    assert set(loop.receding) == {"value", "goal"}
    assert dict(zip(loop.receding, loop.values, strict=True))["goal"] == str(goal)


@pytest.mark.parametrize(
    ("test", "step", "goal", "more"),
    [
        ("value != goal", 0.1, 100, ""),  # on its way
        ("value < goal", 1, 300, ""),
        ("value == goal or rounds < 900", 0, 0, "        rounds += 1\n"),  # more than a comparison
        ("value < goal", -1, 3, "        rounds += 1\n        if rounds > 50:\n            break\n"),  # another way out
        ("value != goal", "(1 if value < 2 else -5)", 4.5, ""),  # to and fro
    ],
)
def test_loops_that_may_end(tmp_path: Path, test: str, step: object, goal: float, more: str) -> None:
    assert looked_at(tmp_path, LOOP.format(test=test, step=step, goal=goal, more=more)).receding == ()


@pytest.mark.parametrize(("size", "hopeless"), [("2", True), ("1 + rounds % 2", False)])
def test_a_branch_that_reads_a_length(tmp_path: Path, size: str, hopeless: bool) -> None:
    source = (
        "def run(note):\n    start, rounds = 0, 0\n    while start < 8:\n        rounds += 1\n"
        f"        piece = [0] * ({size})\n        note()\n        if len(piece) < 3:\n            continue\n"
        "        start += 1\n"
    )
    loop = looked_at(tmp_path, source)
    assert loop.unchanged == ("start",)
    assert loop.hopeless is hopeless


CONTENT = """
from collections import Counter, OrderedDict, UserList, defaultdict
def run(note):
    left, rounds = {left}, 0
    while left:
        rounds += 1
        if rounds > {rounds}:
            del left[rounds % 4]
        note()
"""


@pytest.mark.parametrize("left", ["dict.fromkeys(range(9))", "Counter(range(9))", "OrderedDict.fromkeys(range(9))"])
def test_what_a_container_holds_is_looked_at(tmp_path: Path, left: str) -> None:
    assert looked_at(tmp_path, CONTENT.format(left=left, rounds=2), looks=4).unchanged == ()
    assert looked_at(tmp_path, CONTENT.format(left=left, rounds=90), looks=4).unchanged == ("left",)


def test_an_object_that_decides_by_itself_whether_it_is_true(tmp_path: Path) -> None:
    assert looked_at(tmp_path, CONTENT.format(left="UserList(range(9))", rounds=90), looks=4).unchanged == ()


def test_the_owner_of_an_attribute_is_not_asked(tmp_path: Path) -> None:
    source = """
class Pool:
    def __init__(self):
        self.left = [3]
    def __len__(self):
        return 1
def run(note):
    pool, rounds = Pool(), 0
    while pool.left:
        rounds += 1
        note()
"""
    assert looked_at(tmp_path, source).unchanged == ("pool.left",)
