"""What counts as growth, and which lines of the source fill and empty a holder."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path

import pytest

from torchmedic.detect.growth import Growth, growths
from torchmedic.observe.holders import Held
from torchmedic.observe.leaks import LeakWatch, Look, Point
from torchmedic.observe.weighing import Weight, weigh
from torchmedic.replay.putters import Traffic, traffic

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


def of_source(source: str, name: str = "kept", *, local: int = 0) -> Traffic:
    file = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    last = name.partition("[")[0].rpartition(".")[2]
    return traffic(Held(name, last, "items", 9, file, local), [])


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
