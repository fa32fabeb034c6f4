"""What counts as growth, and which lines of the source fill and empty a holder."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path

import pytest

from torchmedic.detect.growth import Growth, growths
from torchmedic.observe.holders import Held, Walk
from torchmedic.observe.leaks import LeakWatch, Look, Point
from torchmedic.observe.weighing import Weight, weigh
from torchmedic.replay.keys import counts
from torchmedic.replay.putters import traffic
from torchmedic.replay.sites import Traffic

WITH_GRAPH = Weight(1, 1, 4, 0, None, frozenset({"Tensor"}))
BIG = Weight(1, 0, 1 << 20, 0, None, frozenset({"Tensor"}))
NUMBER = Weight(0, 0, 24, 0, None, frozenset({"float"}))


def found(sizes: list[int], weight: Weight = WITH_GRAPH, *, step: int = 8, bounded: bool = False) -> list[Growth]:
    watch = LeakWatch(lambda watch, frame: None, lambda held: None, lambda: 0)
    for number, size in enumerate(sizes):
        look = Look((number + 1) * step, 0, 0, 0.0, 0, 0, {"pass 1": number // 2})
        held = Held("kept", "kept", "items", size, "train.py", 0, bounded)
        watch.looks.append(look)
        watch.tracks.setdefault((1, "kept"), []).append(Point(look, held, weight))
    return list(growths(watch))


def test_steady_growth_is_found_with_its_rate() -> None:
    (growth,) = found([8, 16, 24, 32, 40])
    assert (growth.what, growth.period, growth.rate, growth.periods) == ("graphs", "step", 1.0, 32)
    (growth,) = found([8, 16, 24, 32, 40], BIG)
    assert (growth.what, growth.bytes_held) == ("data", 40 << 20)


def test_growth_with_a_longer_period_is_told_as_such() -> None:
    (growth,) = found([1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    assert (growth.period, growth.rate, growth.periods) == ("pass", 1.0, 4)


@pytest.mark.parametrize(
    ("sizes", "weight", "bounded"),
    [
        ([8, 16, 24, 32], WITH_GRAPH, False),  # too few looks
        ([8, 16, 24, 24, 24, 24], WITH_GRAPH, False),  # it has filled up
        ([32, 56, 68, 74, 77, 78], WITH_GRAPH, False),  # it is about to
        ([8, 16, 24, 32, 40], NUMBER, False),
        ([8, 16, 24, 32, 40], WITH_GRAPH, True),
        ([8, 8, 8, 8, 40], WITH_GRAPH, False),
    ],
)
def test_what_is_no_growth(sizes: list[int], weight: Weight, bounded: bool) -> None:
    assert found(sizes, weight, bounded=bounded) == []


def test_items_are_weighed_with_what_hangs_on_them() -> None:
    import torch

    graph = torch.ones(4, requires_grad=True) * 2
    weight = weigh([{"loss": graph, "rows": [[0.5] * 1000] * 100}] * 4)
    assert weight is not None
    assert (weight.tensors, weight.graphs, weight.device) == (1, 1, 0)
    assert 20_000 < weight.host < 4_000_000
    assert weight.has_witness(weight)
    again = weigh([graph.detach()])
    assert again is not None
    assert not again.has_witness(weight)


def of_source(source: str, name: str = "kept", *, local: int = 0, **more: str) -> Traffic:
    file = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    last = name.partition("[")[0].rpartition(".")[2]
    return traffic(Held(name, last, "items", 9, file, local, **more), [])


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("kept.append(loss)", "kept"),
        ("kept += [loss]", "kept"),
        ("kept = kept + [loss]", "kept"),
        ("out, kept = cell(x, kept)", "kept"),
        ("kept[step] = loss", "kept"),
        ("kept['a'].append(loss)", "kept['a']"),
        ("kept.setdefault('a', []).append(loss)", "kept['a']"),
        ("trainer.kept.extend([loss])", "self.kept"),
        ("heapq.heappush(kept, (0, loss))", "kept"),
    ],
)
def test_the_line_that_puts_in_is_found(line: str, name: str) -> None:
    found = of_source(f"kept = []\nother.append(1)\nfor step in steps:\n    {line}\n", name)
    assert [site.node.lineno for site in found.puts] == [4]
    assert found.takes == []


def test_what_belongs_to_a_library_is_filled_by_its_owner_or_from_outside() -> None:
    held = Held("self.jobs.queue", "jobs", "items", 9, "", 0)
    for line in ("self.jobs.put(loss)", "jobs.queue.append(loss)"):
        file = f"<ipython-input-{line}>"
        linecache.cache[file] = (len(line), None, [f"{line}\n"], file)
        assert [site.node.lineno for site in traffic(held, [file]).puts] == [1]


def test_a_number_comes_after_what_may_be_a_tensor() -> None:
    found = of_source("kept.append(loss.item())\nkept.append(loss)\n")
    assert [site.node.lineno for site in found.puts] == [2, 1]


@pytest.mark.parametrize(
    "line", ["kept.clear()", "kept.pop(0)", "del kept[:5]", "kept[:] = []", "kept = kept[-5:]", "kept = []"]
)
def test_the_line_that_takes_out_is_found(line: str) -> None:
    found = of_source(f"kept = []\nfor step in steps:\n    kept.append(loss)\n    {line}\n")
    assert [site.node.lineno for site in found.takes] == [4]


def test_to_begin_is_not_to_take_out() -> None:
    loop = "    for x in data:\n        if kept is None:\n            kept = x\n        kept += x\n"
    source = f"def train():\n    kept = None\n{loop}"
    found = of_source(source, local=1)
    assert found.takes == []
    assert [site.node.lineno for site in found.puts] == [6]


def test_a_length_that_is_looked_at_is_a_limit() -> None:
    assert of_source("for x in data:\n    if len(kept) < 50:\n        kept.append(x)\n").is_limited
    assert of_source("def put(x):\n    if len(kept) >= 50:\n        return\n    kept.append(x)\n").is_limited
    assert not of_source(
        "for x in data:\n    kept.append(x)\n    if len(kept) % 10 == 0:\n        print()\n"
    ).is_limited


def test_another_function_of_the_same_name_is_another_variable() -> None:
    source = "def one():\n    kept = []\n    kept.append(1)\n\n\ndef two():\n    kept = []\n    kept.append(2)\n"
    assert [site.node.lineno for site in of_source(source, local=6).puts] == [8]


def test_a_key_that_is_asked_for_first_makes_a_cache() -> None:
    found = of_source("def get(key):\n    if key not in kept:\n        kept[key] = load(key)\n    return kept[key]\n")
    assert [site.is_guarded for site in found.puts] == [True]
    assert isinstance(found.puts[0].node, ast.Assign)


def test_the_gauge_writes_no_more_than_a_line_a_second(tmp_path: Path) -> None:
    from torchmedic.observe.memory import DeviceMemory
    from torchmedic.observe.memory_series import MemorySeries

    lines: list[dict[str, object]] = []
    pressed: list[float] = []
    series = MemorySeries(
        lambda kind, **fields: lines.append(fields), lambda: (1, "forward"), lambda: pressed.append(0.0), most=1000
    )
    for quarter in range(4 * 86_400):
        series.reading(quarter / 4, 600 if quarter > 8 else 100, DeviceMemory(5, 7, 6))
    assert 1000 < len(lines) < 8000
    assert lines[0] == {"step": 1, "phase": "forward", "rss": 100, "allocated": 5, "reserved": 7, "peak": 6}
    # Whoever holds much memory is asked for soon while it grows, and rarely when it stays.
    assert len(pressed) < 86_400 / 50
    before = len(pressed)
    for quarter in range(400):
        series.reading(100_000 + quarter / 4, 700 + 5 * quarter, DeviceMemory())
    assert len(pressed) - before >= 25


@pytest.mark.parametrize(
    "line",
    ["trim(kept)", "box = kept\n    box.clear()", "old, kept = kept, []", "loads, kept[:] = list(kept), []"],
)
def test_what_another_name_takes_out_is_gone(line: str) -> None:
    helper = "def trim(values):\n    while len(values) > 5:\n        values.pop(0)\n\n\n"
    assert of_source(f"{helper}kept = []\nfor step in steps:\n    kept.append(loss)\n    {line}\n").takes


def test_a_class_of_the_users_may_bound_itself() -> None:
    source = (
        "class Recent(dict):\n    def put(self, key, value):\n        self[key] = value\n"
        "        if len(self) > 9:\n            self.popitem()\n"
    )
    assert of_source(source, own="Recent").takes
    assert not of_source(source, own="Other").takes


CHAINS = {
    "self.kept = Node(loss, self.kept)": (4, False),  # put at the head
    "self.kept.before = Node(loss)": (4, False),  # and at the end
    "self.kept.before.append(Node(loss))": (4, False),  # a tree
    "self.kept = Node(loss)": (None, True),  # made anew
    "self.kept.before = None": (None, True),  # cut
}


@pytest.mark.parametrize("line", CHAINS)
def test_a_chain_grows_where_a_link_is_added_and_ends_where_it_is_cut(line: str) -> None:
    source = f"class Run:\n    def __init__(self):\n        self.kept = None\n    def step(self, loss): {line}\n"
    found = of_source(source, "run.kept", via="before")
    where, is_cut = CHAINS[line]
    assert [site.node.lineno for site in found.puts][:1] == ([where] if where else [])
    assert bool(found.takes) is is_cut


@pytest.mark.parametrize(
    ("source", "endless"),
    [
        ("for step in range(9):\n    kept[step] = x\n", True),
        ("for step in range(9):\n    kept[f'{step}'] = x\n", True),
        ("for task in tasks:\n    kept[task] = x\n", False),
        ("for step in range(9):\n    kept[step % 5] = x\n", False),
        ("n = 0\nwhile True:\n    n += 1\n    kept[n] = x\n", True),
        ("def log(at, x):\n    kept[at] = x\nfor i, x in enumerate(data):\n    log(i, x)\n", True),
        ("def log(at, x):\n    kept[at] = x\nfor x in data:\n    log(x.name, x)\n", False),
        ("for task in tasks:\n    kept.append(x)\n", True),
    ],
)
def test_keys_that_count_never_end_and_names_do(source: str, endless: bool) -> None:
    (site,) = of_source(source).puts
    assert counts(Held("kept", "kept", "items", 9, site.file, 0), site, [site.file]) is endless


def test_a_walk_adds_up_what_stands_behind_one_name_in_many_pieces() -> None:
    import torch

    class Link:
        def __init__(self, value: object, before: object) -> None:
            self.value, self.before = value, before

    def walked(since: int) -> tuple[dict[tuple[int, str], Held], object]:
        chain: object = None
        for _ in range(40):
            chain = Link(torch.ones(1, requires_grad=True) * 2, chain)
        tens = {number: [torch.ones(1, requires_grad=True) * 2 for _ in range(10)] for number in range(6)}
        places = [torch.ones(1, requires_grad=True) * 2, *[None] * 9]
        # No `assert` in here: pytest would look at the variables too, and then the walk does not.
        return Walk(since, {}, weigh).run(sys._getframe()).holders, (chain, tens, places)

    found, _ = walked(1 << 60)
    assert (found[0, "reached chain"].size, found[0, "reached chain"].via) == (38, "before")
    assert found[0, "reached tens"].size == 60
    assert (0, "reached places") not in found
    assert not any(key[1].startswith("reached") for key in walked(1)[0])
