"""What counts as growth, and which lines of the source fill and empty a holder."""

from __future__ import annotations

import ast
import asyncio
import linecache
import sys
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from torchmedic.detect.trends.heap_growth import Growth, growths
from torchmedic.evidence.leaks.evidence import is_read
from torchmedic.evidence.leaks.grown_memory import own_bytes
from torchmedic.evidence.leaks.keys import counts, is_bounded, is_by_identity, never_returns
from torchmedic.evidence.leaks.lifetimes import Lifetime
from torchmedic.evidence.leaks.source.sites import Traffic
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.leaks.source.training_loops import training_loops
from torchmedic.evidence.memory.source.differentiated import is_name_differentiated
from torchmedic.observe.budget import Budget
from torchmedic.observe.heap import walk
from torchmedic.observe.heap.growth_watch import LeakWatch, Look, Point
from torchmedic.observe.heap.unnamed_objects import owners_of_methods, unnamed_objects
from torchmedic.observe.heap.walk import Held, Walk
from torchmedic.observe.heap.weighing import Weight, weigh
from torchmedic.source import user_variables
from torchmedic.source.objects.containers import keys_of
from torchmedic.source.user_variables import looks_at_locals

WITH_GRAPH = Weight(1, 1, 4, 0, None, frozenset({"Tensor"}))
BIG = Weight(1, 0, 1 << 20, 0, None, frozenset({"Tensor"}))
NUMBER = Weight(0, 0, 24, 0, None, frozenset({"float"}))


def found(sizes: list[int], weight: Weight = WITH_GRAPH, *, step: int = 8, bounded: bool = False) -> list[Growth]:
    watch = LeakWatch(lambda watch, frame: None, lambda held: None, lambda: 0, Budget().leaks)
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


def test_a_longer_period_may_pass_more_than_once_between_looks() -> None:
    watch = LeakWatch(lambda watch, frame: None, lambda held: None, lambda: 0, Budget().leaks)
    for passes in (1, 2, 3, 5, 8, 12):
        look = Look(10 * passes, 0, 0, 0.0, 0, 0, {"pass 1": passes})
        held = Held("kept", "kept", "items", 4 * passes, "train.py", 0)
        watch.looks.append(look)
        watch.tracks.setdefault((1, "kept"), []).append(Point(look, held, BIG))
    (growth,) = growths(watch)
    assert (growth.period, growth.rate, growth.periods) == ("pass", 4.0, 11)


def test_hooks_come_first_and_what_each_of_them_has_is_not_told() -> None:
    watch = LeakWatch(lambda watch, frame: None, lambda held: None, lambda: 0, Budget().leaks)
    for number in range(1, 6):
        look = Look(8 * number, 0, 0, 0.0, 0, 0, {})
        watch.looks.append(look)
        hooks = Held("model.1", "_forward_hooks", "hooks", 8 * number, "", 0, via="_forward_hooks")
        watch.tracks.setdefault((1, "hooks"), []).append(Point(look, hooks, None))
        for key in (2, 3):
            store = Held("store", "store", "items", 8 * number, "train.py", 0)
            watch.tracks.setdefault((key, "store"), []).append(Point(look, store, WITH_GRAPH))
        seen = Held("seen", "seen", "items", 8 * number, "train.py", 0)
        watch.tracks.setdefault((4, "seen"), []).append(Point(look, seen, BIG))
        mass = seen._replace(kind="mass", size=number << 23, old=8 * number)
        watch.tracks.setdefault((0, "mass seen"), []).append(Point(look, mass, None))
    assert [(growth.what, growth.held.kind) for growth in growths(watch)] == [
        *(("hooks", "hooks"), ("data", "items"), ("data", "mass")),
    ]


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


def test_what_will_run_some_time_is_weighed_with_what_it_keeps() -> None:
    graph = torch.ones(4, requires_grad=True) * 2

    def waiting(value: torch.Tensor) -> Iterator[torch.Tensor]:
        while True:
            yield value

    async def task() -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(asyncio.sleep(0, graph)), asyncio.create_task(asyncio.sleep(0))]

    async def done() -> list[asyncio.Task[Any]]:
        tasks = await task()
        await asyncio.gather(*tasks)
        return tasks

    begun = waiting(graph)
    next(begun)
    kept = [partial(print, graph), lambda: graph, graph.item, begun, asyncio.run(done())[0]]
    for each in kept:
        weight = weigh([each, each])
        assert weight is not None
        assert weight.graphs == 1, each
    plain = weigh([partial(print, 1), [].append])
    assert plain is not None
    assert plain.graphs == plain.tensors == 0


def of_source(source: str, name: str = "kept", *, local: int = 0, **more: Any) -> Traffic:
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
        ("out.register_hook(kept.append)", "kept"),
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


def test_self_in_another_class_means_another_attribute() -> None:
    meter = "class Meter:\n    def add(self, x):\n        self.kept.append(x)\n    def reset(self): self.kept.clear()\n"
    source = f"{meter}class Recorder(Base):\n    def note(self, x):\n        self.kept.append(x)\n"
    found = of_source(source, "log.kept", owners=("Recorder", "Base", "object"))
    assert ([site.node.lineno for site in found.puts], found.takes) == ([7], [])
    found = of_source(f"{source}log.kept.clear()\n", "log.kept", owners=("Recorder", "Base", "object"))
    assert [site.node.lineno for site in found.takes] == [8]
    assert len(of_source(source, "log.kept").puts) == 2  # where nobody knows whose it is
    variable = "def train():\n    kept = []\n    for x in data:\n        kept.append(x)\n        net.kept = []\n"
    assert of_source(variable, local=1).takes == []


def test_a_number_comes_after_what_may_be_a_tensor() -> None:
    found = of_source("kept.append(loss.item())\nkept.append(loss)\n")
    assert [site.node.lineno for site in found.puts] == [2, 1]


@pytest.mark.parametrize(
    "line",
    [
        *("kept.clear()", "kept.pop(0)", "del kept[:5]", "kept[:] = []", "kept = kept[-5:]", "kept = []"),
        *("if kept: kept = []", "if len(kept) > 9: kept = []", "task.add_done_callback(kept.remove)"),
        *("kept = {name: [] for name in kept}", "kept = [[] for _ in kept]", "with run() as kept: pass"),
    ],
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


@pytest.mark.parametrize("line", ["if not kept: kept = []", "if kept is None: kept = []"])
def test_to_begin_where_there_is_nothing_is_not_to_take_out(line: str) -> None:
    assert of_source(f"kept = []\nfor step in steps:\n    kept.append(loss)\n    {line}\n").takes == []
    # Nor is a loop that makes ready, before the one that trains.
    ready = "for p in model:\n    p.kept = []\nfor x in data:\n    loss(x).backward()\n    p.kept.append(x)\n"
    assert of_source(ready, "model.weight.kept").takes == []


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
    from torchmedic.observe.memory.usage import DeviceMemory, MemorySeries

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
        ("def log(at, x):\n    kept[at] = x\nfor x in data:\n    log(x.name, x)\n", False),
        ("for task in tasks:\n    kept.append(x)\n", True),
        ("for epoch in range(9):\n    for at in range(5):\n        kept[at] = x\n", False),
        (
            "for epoch in range(9):\n    for at in range(5):\n        key = epoch * 5 + at\n        kept[key] = x\n",
            True,
        ),
        ("for epoch in epochs:\n    n = 0\n    for x in data:\n        kept[n] = x\n        n += 1\n", False),
        ("def run():\n    for at in range(5):\n        kept[at] = x\nfor _ in epochs:\n    run()\n", False),
        ("for x in data:\n    kept['%d' % x.at, time.time()] = x\n", True),
    ],
)
def test_keys_that_count_never_end_and_names_do(source: str, endless: bool) -> None:
    (site,) = of_source(source).puts
    assert counts(Held("kept", "kept", "items", 9, site.file, 0), site, [site.file]) is endless


@pytest.mark.parametrize(
    ("line", "bounded", "by_identity"),
    [
        ("kept[step % size] = x", True, False),
        ("at = self.n & 63\n    kept[at] = x", True, False),
        ("kept[epoch, step % 4] = x", False, False),
        ("kept['%d' % step] = x", False, False),
        ("key = (id(x), x.shape)\n    kept[key] = x", False, True),
    ],
)
def test_a_remainder_comes_again_and_an_identity_does_not(line: str, bounded: bool, by_identity: bool) -> None:
    (site,) = of_source(f"for x in data:\n    {line}\n").puts
    assert (is_bounded(site), is_by_identity(site)) == (bounded, by_identity)


def test_a_graph_that_is_cut_off_now_and_then_has_an_end() -> None:
    loop = "for x in data:\n    kept = cell(x, kept)\n"
    helper = "def cut(h):\n    return tuple(v.detach() for v in h)\n"
    for more, is_cut in (
        ("", False),
        ("    if last: kept = kept.detach()\n", True),
        ("    if last: kept = tuple(h.detach() for h in kept)\n", True),
        ("    if last: kept = cut(kept)\n", True),
        ("    if last: kept = kept - x.detach()\n", False),
    ):
        file = f"<ipython-input-cut {more}>"
        linecache.cache[file] = (0, None, (helper + loop + more).splitlines(keepends=True), file)
        found = traffic(Held("kept", "kept", "age", 9, file, 0), [])
        assert [site.node.lineno for site in found.puts][:1] == [4]
        assert bool(found.takes) is is_cut, more


def test_a_method_that_begins_anew_counts_where_it_is_called_again() -> None:
    meter = (
        "class Meter:\n    def __init__(self):\n        self.reset()\n    def reset(self):\n        self.kept = []\n"
    )
    meter += "    def add(self, x):\n        self.kept.append(x)\n"
    assert of_source(meter, "meter.kept").takes == []
    assert of_source(f"{meter}meter.reset()\n", "meter.kept").takes != []


def test_who_made_it_says_how_long_it_lives() -> None:
    file = "<ipython-input-lives>"
    source = (
        "def step(meter, values):\n    return frames()\n"
        "def epoch(meter, make):\n    own = meter or make()\n    return step(own, own.kept)\n"
        "def run(meter):\n    for _ in range(1):\n        return epoch(meter, Meter)\n"
        "def whole():\n    ours = Meter()\n    for _ in range(1):\n        return epoch(ours, None)\n"
    )

    class Meter:
        def __init__(self) -> None:
            self.kept: list[object] = []

    frames: list[Any] = []

    def look() -> None:
        frame: Any = sys._getframe(1)
        frames.clear()
        while frame.f_code.co_filename == file:
            frames.append(frame)
            frame = frame.f_back

    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    variables: dict[str, Any] = {"Meter": Meter, "frames": look}
    exec(compile(source, file, "exec"), variables)
    held = Held("meter.kept", "kept", "items", 9, file, 0)
    variables["run"](None)
    assert Lifetime(held, frames, [file]).is_one_call  # `epoch` has made it, and is called in a loop
    variables["whole"]()
    assert not Lifetime(held, frames, [file]).is_one_call  # it was handed on, and is older than the loop


def test_an_owner_under_another_name_is_the_same_owner() -> None:
    loop = "for x in data:\n    stats = self.config.stats\n    stats.kept.append(x)\n"
    for more, passes in (("", False), ("    self.config.stats = Stats()\n", True), ("    stats = Stats()\n", True)):
        file = f"<ipython-input-owner {more}>"
        linecache.cache[file] = (0, None, (loop + more).splitlines(keepends=True), file)
        held = Held("stats.kept", "kept", "items", 9, file, 0)
        assert Lifetime(held, [], [file]).has_passing_owner is passes


@pytest.fixture
def only_locals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk has its limit, and the tests' own modules, of which a whole run loads many, would use it up."""
    monkeypatch.setattr(walk, "roots", lambda frame: (root for root in user_variables.roots(frame) if root[1]))


@pytest.mark.usefixtures("only_locals")
def test_fields_have_their_names() -> None:
    rollout_type = namedtuple("rollout_type", "values rewards")

    def walked() -> dict[tuple[int, str], Held]:
        rollout = rollout_type([1], [2])
        return Walk(1, {}, weigh).run(sys._getframe()).holders if rollout else {}

    assert {"rollout.values", "rollout.rewards"} <= {held.name for held in walked().values()}


def test_what_only_a_library_knows_is_found_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchmedic.observe.heap.unnamed_objects._MAX_OTHERS", 1_000_000)  # other tests left some
    found: list[object] = []

    class Visitor(ast.NodeVisitor):
        def visit_Name(self, node: ast.Name) -> None:
            found.extend(owners_of_methods(sys._getframe()))

    Visitor().visit(ast.parse("name"))
    assert {type(each) for each in found} >= {Visitor}

    class Record:
        pass

    lone, many = Visitor(), [Record() for _ in range(9)]
    unnamed = unnamed_objects()
    assert any(each is lone for each in unnamed)
    assert not any(type(each) is Record for each in unnamed), many


def test_a_walk_adds_up_what_stands_behind_one_name_in_many_pieces() -> None:
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
        # The walk also visits the variables of all test modules, so that the usual limit would end it too early.
        found = Walk(since, {}, weigh).run(sys._getframe(), most=1 << 20)
        return found.holders, (chain, tens, places)

    found, _ = walked(1 << 60)
    assert (found[0, "reached chain"].size, found[0, "reached chain"].via) == (38, "before")
    assert found[0, "reached tens"].size == 60
    assert (0, "reached places") not in found
    assert not any(key[1].startswith("reached") for key in walked(1)[0])


@pytest.mark.parametrize(
    ("source", "never"),
    [
        ("for step in range(9):\n    if step not in kept:\n        kept[step] = x\n", True),
        ("for at in range(len(data)):\n    if at not in kept:\n        kept[at] = x\n", False),
        ("for at in range(9):\n    if names[at] not in kept:\n        kept[names[at]] = x\n", False),
        ("def get(index):\n    key = (index, random.random())\n    if key not in kept:\n        kept[key] = x\n", True),
        ("def get(index):\n    if index not in kept:\n        kept[index] = x\n", False),
    ],
)
def test_a_cache_is_of_no_use_where_no_key_comes_again(source: str, never: bool) -> None:
    (site,) = of_source(source).puts
    assert site.is_guarded
    assert never_returns(Held("kept", "kept", "items", 9, site.file, 0), site, [site.file]) is never


def test_keys_that_nobody_else_has_are_told_from_those_that_live() -> None:
    import torch

    alive = torch.ones(1)
    assert keys_of({torch.ones(1): 1, torch.ones(1): 2}) == "lost"
    assert keys_of({alive: 1, torch.ones(1): 2}) == "objects"
    assert keys_of({(torch.ones(1), 3): 1}) == "lost"
    assert keys_of({"loss": 1, 5: 2}) == keys_of({}) == ""


def test_what_nobody_reads_is_kept_for_nothing() -> None:
    filling = "class Data:\n    def get(self, x):\n        self.kept.append(x)\n        return len(self.kept)\n"
    again = "class More(Data):\n    def put(self):\n        self.kept[at] = x\n        yield self.kept[at]\n"
    for more, is_used in (("", False), ("data.kept[0].show()\n", True), ("other.keep = 1\n", False), (again, False)):
        found = of_source(filling + more, "data.kept")
        file = found.puts[0].file
        assert is_read(Held("data.kept", "kept", "items", 9, file, 0), found, [file]) is is_used


TRAINED = {
    "for r in range(9):\n    kept.append(ask())\n    for _ in range(5):\n        loss(kept).backward()\n": True,
    "for r in range(9):\n    kept.append(1)\n    x = cat(kept)\n    for _ in s:\n        loss(x).backward()\n": True,
    "def fit(a):\n    for x in a:\n        f(x).backward()\nfor r in s:\n    kept.append(1)\n    fit(kept)\n": True,
    "for r in range(9):\n    kept.append(ask())\n    for x in data:\n        loss(x).backward()\n": False,
    "for r in range(9):\n    kept.append(ask())\n    loss(kept[-1]).backward()\n": False,
}


@pytest.mark.parametrize("source", TRAINED)
def test_what_is_filled_between_trainings_and_used_by_them_is_meant(source: str) -> None:
    (site,) = of_source(source).puts
    loops = training_loops([site.file])
    assert loops.read_what_others_fill(Held("kept", "kept", "items", 9, site.file, 0), site) is TRAINED[source]


def test_what_a_loss_is_made_from_needs_its_graph() -> None:
    made = "def step():\n    kept.append(prob)\n    loss = -stack(kept[5:]).sum()\n    loss.backward()\n"
    for source, needed in (
        (made, True),
        (made.replace("loss.backward()", "self.manual_backward(loss)"), True),
        (made.replace("loss.backward()", "accelerator.backward(loss)"), True),
        (made.replace("loss.backward()", "scaler.scale(loss).backward()"), True),
        (made.replace("sum()", "sum().float()"), True),
        (made.replace("sum()", "sum().detach()"), False),
    ):
        (site,) = of_source(source).puts
        assert is_name_differentiated("kept", [site.file]) is needed


def test_a_graph_is_weighed_without_what_others_keep_too() -> None:
    import torch

    weight, data = torch.ones(64, 64, requires_grad=True), torch.ones(256, 64)
    first, second = ((data @ weight).exp() for _ in range(2))
    assert own_bytes([first], [second]) == 256 * 64 * 4
    assert own_bytes([first], [first]) == 0


def test_a_method_that_is_called_eval_is_not_the_function() -> None:
    def validates(model: torch.nn.Module) -> torch.nn.Module:
        return model.eval()

    def evaluates(text: str) -> object:
        return eval(text)

    def looks() -> dict[str, object]:
        return locals()

    assert [looks_at_locals(each.__code__) for each in (validates, evaluates, looks)] == [False, True, True]


def test_a_tensor_subclass_sees_nothing_of_the_walk() -> None:
    seen: list[Any] = []

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    kept = [torch.ones(3, requires_grad=True).as_subclass(Noted)]
    before = len(seen)
    Walk(1, {}, weigh).run(sys._getframe())
    assert len(seen) == before
    assert len(kept) == 1
