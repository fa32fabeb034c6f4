"""The `if` that a line depends on, the `if` that leaves a loop before it, and the loops around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchmedic.source.branches import (
    Branch,
    assignments_of,
    branches_around,
    call_in_called,
    calls_by_rank,
    exits_before,
    flags_of_loop,
    loops_around,
    process_ends,
    process_ends_between,
)
from torchmedic.source.line_relations import (
    asks_for_gradient,
    exits_before_other_side,
    follows_in_block,
    in_comprehension,
    in_one_try,
    is_after_in_block,
    is_on_both_sides,
    lines_that_set,
    reads_attribute,
    trained_models,
)

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
    assert is_after_in_block(file, line("all_reduce"), {"broadcast"})
    assert not is_after_in_block(file, line("broadcast"), {"all_reduce"})
    assert not is_after_in_block(file, line("for item in items"), {"save"})  # only one branch calls it


def test_a_handler_that_leaves_the_turn(tmp_path: Path) -> None:
    text = "for row in rows:\n    try:\n        x = parse(row)\n    except ValueError:\n        continue\n    step(x)\n"
    path = tmp_path / "train.py"
    path.write_text(text)
    (found,) = exits_before(str(path), 6)
    assert (found.line, found.header, found.exit) == (4, "except ValueError", "continue")


def test_what_ends_the_loop_of_a_library_is_looked_for_in_the_script(tmp_path: Path) -> None:
    library, script = tmp_path / "library.py", tmp_path / "train.py"
    library.write_text(
        "class Loop:\n    @property\n    def done(self):\n        return self.trainer.should_stop\n\n"
        "    def run(self):\n        while not self.done:\n            self.advance()\n"
    )
    script.write_text("trainer.should_stop = False\nmodel.training = True\ntrainer.should_stop = True\n")
    (loop,) = loops_around(str(library), 8)
    assert assignments_of(str(script), flags_of_loop(str(library), loop)) == [(3, "should_stop")]


@pytest.mark.parametrize(
    ("test", "expected"),
    [("rank == 0", True), ("rank > 0 and step < 3", False), ("is_main and self.rank == 0", True), ("done", False)],
)
def test_a_test_that_only_the_rank_decides(test: str, expected: bool) -> None:
    assert Branch(1, test, True, True).only_by_rank is expected


@pytest.mark.parametrize(
    ("statement", "by_rank"),
    [
        ("text = report() if rank == 0 else None", True),
        ("rank == 0 and report()", True),
        ("text = None if state.is_world_process_zero else report()", True),
        ("text = report() if step > 3 else None", False),
        ("text = report() if rank == 0 else other()", None),
        ("text = rank == 0 and ready", None),
        ("found = is_nonzero(x) and report()", None),
    ],
)
def test_an_expression_may_be_a_branch(tmp_path: Path, statement: str, by_rank: bool | None) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def main():\n    {statement}\n")
    found = branches_around(str(path), 2)
    assert [branch.by_rank for branch in found] == ([] if by_rank is None else [by_rank])


def test_what_ends_the_process_of_a_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def check(x):\n"
        "    if x.bad:\n"
        "        sys.exit(1)\n"
        "def usage():\n"
        "    raise SystemExit\n"
        "def main():\n"
        "    for x in data:\n"
        "        check(x)\n"
        "        if rank == 0:\n"
        "            model.load_state_dict(best)\n"
        "sys.exit(main())\n"
    )
    (loop,) = loops_around(str(path), 8)
    assert process_ends(str(path), loop) == [3]
    assert calls_by_rank(str(path), lambda name: name == "load_state_dict") == [10]
    assert calls_by_rank(str(path), lambda name: name == "check") == []
    path = tmp_path / "clip.py"
    path.write_text(
        "def note(net):\n"
        "    clip_grad_norm_(net.parameters(), 1.0)\n"
        "net = build()\n"
        "optimizer = SGD(net.parameters())\n"
        "if rank == 0:\n"
        "    note(net)\n"
    )
    assert calls_by_rank(str(path), lambda name: name == "clip_grad_norm_") == [6]
    path = tmp_path / "deep.py"
    path.write_text(
        "def note(net):\n"
        "    clip_grad_norm_(net.parameters(), 1.0)\n"
        "def report(net):\n"
        "    print(note(net))\n"
        "net = build()\n"
        "optimizer = SGD(net.parameters())\n"
        "if rank == 0:\n"
        "    report(net)\n"
    )
    assert calls_by_rank(str(path), lambda name: name == "clip_grad_norm_") == [8]
    assert trained_models(str(path)) == [5]


def test_a_handler_around_a_line_may_have_left_it_out(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "for x in data:\n"
        "    if x.bad:\n"
        "        continue\n"
        "    try:\n"
        "        y = parse(x)\n"
        "        step(y)\n"
        "    except ValueError:\n"
        "        print('skipped')\n"
        "    except StopIteration:\n"
        "        break\n"
        "    except OSError:\n"
        "        raise\n"
    )
    found = exits_before(str(path), 6)
    assert [(branch.line, branch.exit) for branch in found] == [(2, "continue"), (7, "continue")]


def test_how_lines_lie_to_each_other(tmp_path: Path) -> None:
    file = tmp_path / "lines.py"
    file.write_text(
        "def load(rank):\n"
        "    if known:\n"
        "        return cache\n"
        "    if rank != 0:\n"
        "        barrier()\n"
        "        return read()\n"
        "    build()\n"
        "    barrier()\n"
        "    if rank == 0:\n"
        "        all_reduce()\n"
        "    if rank == 0:\n"
        "        all_reduce()\n"
        "    try:\n"
        "        work()\n"
        "        group['lr'] = rate.module\n"
        "    finally:\n"
        "        barrier()\n"
    )
    name = str(file)
    by_rank = next(each for each in exits_before(name, 8) if each.by_rank)
    assert is_on_both_sides(name, 8, by_rank, "barrier")
    assert not is_on_both_sides(name, 8, by_rank, "build")
    assert not is_on_both_sides(name, 10, branches_around(name, 10)[0], "all_reduce")  # twice on the same side
    assert follows_in_block(name, 5, 8)
    assert in_one_try(name, 14, 15)
    assert not in_one_try(name, 14, 17)
    assert lines_that_set(name, "lr") == [15]
    assert reads_attribute(name, 15, "module")
    assert not reads_attribute(name, 14, "module")


def test_an_exit_between_the_two_sides_of_a_test(tmp_path: Path) -> None:
    file = tmp_path / "cached.py"
    file.write_text(
        "def load(rank):\n"
        "    if not given:\n"
        "        return None\n"
        "    if rank != 0:\n"
        "        barrier()\n"
        "    if known:\n"
        "        return cache\n"
        "    if rank == 0:\n"
        "        barrier()\n"
    )
    name = str(file)
    assert [each.line for each in exits_before_other_side(name, 5, "barrier")] == [6]
    assert exits_before_other_side(name, 9, "barrier") == []
    assert exits_before_other_side(name, 5, "all_reduce") == []


def test_lines_in_functions_that_other_lines_call(tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(
        "def pick(files):\n"
        "    if not files:\n"
        "        sys.exit(0)\n"
        "def finish():\n"
        "    dist.destroy_process_group()\n"
        "def main():\n"
        "    dist.barrier()\n"
        "    pick(files)\n"
        "    wrap(model)\n"
        "    pick(files)\n"
        "    finish()\n"
        "main()\n"
        "finish()\n"
        "pick(files)\n"
    )
    name = str(file)
    assert process_ends_between(name, 7, 9) == [3]
    assert process_ends_between(name, 8, 10) == []  # the call on line 8 is over
    file.with_name("all.py").write_text("def log(plan):\n    return {name: call(name)\n            for name in plan}\n")
    assert in_comprehension(str(file.with_name("all.py")), 2)
    assert not asks_for_gradient(str(file.with_name("all.py")), 2)
    file.with_name("some.py").write_text(
        "[send(p.grad) for p in ps if p.grad is not None]\nif p.grad is None:\n  send(p)\n"
    )
    assert asks_for_gradient(str(file.with_name("some.py")), 1)
    assert asks_for_gradient(str(file.with_name("some.py")), 3)
    assert not in_comprehension(str(file.with_name("all.py")), 1)
    assert call_in_called(name, 12, "destroy_process_group") == ("main", 11)
    assert call_in_called(name, 13, "destroy_process_group") == ("finish", 5)
    assert call_in_called(name, 14, "destroy_process_group") is None
    assert call_in_called(name, 9, "destroy_process_group") is None  # of another file
