"""The `if` that a line depends on, the `if` that leaves a loop before it, and the loops around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.source.branches import branches_around, exits_before, is_after_in_block, loops_around

SOURCE = """
def train(rank, items):
    for epoch in range(3):
        for item in items:
            if item is None:
                continue
            if rank == 0 and item:
                save(item)
            else:
                load(item)
            all_reduce(item)
            if done(item):
                break
            broadcast(item)

if __name__ == "__main__":
    train(0, [])
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


def line(text: str) -> int:
    return next(number for number, each in enumerate(SOURCE.splitlines(), 1) if text in each)


def test_the_branch_that_a_line_is_in(file: str) -> None:
    (branch,) = branches_around(file, line("save(item)"))
    assert (branch.test, branch.taken, branch.by_rank) == ("rank == 0 and item", True, True)
    (branch,) = branches_around(file, line("load(item)"))
    assert not branch.taken
    assert branches_around(file, line("all_reduce")) == []
    assert branches_around(file, line("train(0, [])")) == []  # the guard of a script decides nothing


def test_exits_in_front_of_a_line(file: str) -> None:
    assert [(each.line, each.exit) for each in exits_before(file, line("all_reduce"))] == [
        (line("item is None"), "continue")
    ]
    assert [each.exit for each in exits_before(file, line("broadcast"))] == ["break", "continue"]


def test_loops_and_what_leaves_them(file: str) -> None:
    inner, outer = loops_around(file, line("all_reduce"))
    assert (inner.header, [each.test for each in inner.exits]) == ("for item in items", ["done(item)"])
    assert (outer.header, outer.exits) == ("for epoch in range(3)", ())


def test_a_call_below_in_the_same_block(file: str) -> None:
    assert is_after_in_block(file, line("all_reduce"), "broadcast") == line("broadcast")
    assert is_after_in_block(file, line("broadcast"), "all_reduce") is None
