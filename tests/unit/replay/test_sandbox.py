"""What surrounds a replay: the world outside hears nothing of it, other threads and signals lose nothing by it."""

from __future__ import annotations

import collections
import csv
import functools
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.modules import module as nn_module
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from torchmedic.observe.hooks.patches import NoticedResult
from torchmedic.replay.isolation import python_state
from torchmedic.replay.isolation.outside_world import Refused, exchanges, refusals, sealed
from torchmedic.replay.isolation.python_state import python_left_alone
from torchmedic.replay.isolation.sandbox import signals_deferred
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.side_effects import RestoreWrites, no_side_effects


def test_a_replay_puts_the_hook_of_a_loader_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = dataloader._BaseDataLoaderIter
    hook = NoticedResult(kind.__next__, None, lambda owner, batch: batch)
    monkeypatch.setattr(kind, "__next__", hook)
    with no_side_effects(ReplayResult(), [], None, backward=True, keep_graphs=False):
        assert vars(kind)["__next__"] is not hook
    assert vars(kind)["__next__"] is hook


def test_the_thread_of_a_replay_writes_nothing_and_others_lose_nothing(tmp_path: Path) -> None:
    text, binary = (tmp_path / "text").open("w"), (tmp_path / "binary").open("wb")
    rows = csv.writer(text)
    begun, done = threading.Event(), threading.Event()
    begin = begun.set  # what a replay looks up while it is sealed wakes nobody

    def other() -> None:
        begun.wait()
        text.write("other\n")
        binary.write(b"other")
        (tmp_path / "theirs").write_text("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    text.write("before\n")
    with sealed():
        binary.write(b"ours")
        (tmp_path / "ours").write_text("ours")
        os.write(binary.fileno(), b"ours")
        begun.set()
        assert not begun.is_set()
        begin()
        done.wait()
        text.write("ours\n")
        print("ours", file=text, flush=True)
    with sealed():
        rows.writerow(["ours"])  # it has the method from before
    thread.join()
    text.close()
    binary.close()

    assert (tmp_path / "text").read_text() == "before\nother\n"
    assert (tmp_path / "binary").read_bytes() == b"other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "text", "theirs"]


def test_what_would_reach_outside_is_refused(tmp_path: Path) -> None:
    with sealed():
        for number, act in enumerate(
            (
                lambda: os.posix_spawn("/bin/true", ["true"], {}),
                lambda: os.kill(os.getpid(), signal.SIGKILL),
                lambda: os._exit(3),
                lambda: threading.Thread(target=print).start(),
                lambda: sys.modules["_io"].FileIO(str(tmp_path / "new"), "w"),
                lambda: torch.distributed.init_process_group("gloo", f"file://{tmp_path}/job", rank=0, world_size=2),
            )
        ):
            assert refusals() == number
            with pytest.raises(Refused):
                act()
    assert not list(tmp_path.iterdir())
    assert refusals() == 0


def test_no_other_rank_hears_of_a_replay() -> None:
    group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2)
    with sealed():
        for number, act in enumerate((group.barrier, lambda: group.recv([torch.zeros(2)], 1, 0), group.shutdown)):
            with pytest.raises(Refused):
                act()
            assert exchanges() == min(number + 1, 2)


def test_a_signal_that_comes_in_a_replay_is_handled_after_it() -> None:
    class Ended(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Ended

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        deferred = signals_deferred()
        deferred.__enter__()
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Ended):
            deferred.__exit__(None, None, None)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


class _Slotted:
    __slots__ = ("count",)


class _Plain:
    shared = 0

    def __init__(self) -> None:
        self.items: dict[str, Any] = {"a": 1}


def test_python_objects_are_what_they_were() -> None:
    slotted, plain, ordered = _Slotted(), _Plain(), collections.OrderedDict(a=1, b=2)
    slotted.count, steady, count = 1, iter([1, 2, 3]), 0
    queue, numbers = collections.deque([1], maxlen=2), {1, 2}

    def numbered() -> Iterator[int]:
        yield from range(9)

    def add() -> None:
        nonlocal count
        count += 1

    one_way = numbered()
    with python_left_alone(sys._getframe()) as noted:
        assert not noted.changed
        slotted.count += 1
        _Plain.shared += 1
        plain.items["b"] = plain.more = 2  # type: ignore[attr-defined]
        ordered.move_to_end("a")
        queue.extend([5, 6])
        numbers.clear()
        next(steady)
        add()
        os.environ["TORCHMEDIC_TEST"] = "1"
        assert id(one_way) in noted.one_way
        assert noted.changed

    assert (slotted.count, _Plain.shared, vars(plain)) == (1, 0, {"items": {"a": 1}})
    assert (list(ordered), queue, numbers, next(steady), count) == (["a", "b"], collections.deque([1]), {1, 2}, 1, 0)
    assert "TORCHMEDIC_TEST" not in os.environ


@pytest.mark.parametrize(
    ("module", "count"),
    [("resnet", 1), ("recorder.parts", 1), ("common", 1), ("ipykernel.iostream", 2), ("threading", 2)],
)
def test_only_the_machinery_around_the_step_is_left_alone(module: str, count: int) -> None:
    kept = type("Kept", (), {"__module__": module})()
    kept.count = 1
    with python_left_alone(sys._getframe()):
        kept.count += 1

    assert kept.count == count


def test_older_tensors_are_what_they_were_and_their_graphs_stay_valid() -> None:
    average, weight = torch.ones(4, 4), torch.ones(3, requires_grad=True)
    data = torch.arange(3.0)
    loss = (weight * data).sum()
    with RestoreWrites([weight]):
        average[1].mul_(3)
        average.add_(1)
        data.add_(1)
        fresh = torch.zeros(2)
        fresh.add_(1)
    loss.backward()

    assert torch.equal(average, torch.ones(4, 4))
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 1.0, 2.0]
    assert fresh.tolist() == [1.0, 1.0]


def test_hooks_and_attributes_of_tensors_are_what_they_were() -> None:
    hooked, plain = (torch.zeros(2, requires_grad=True) for _ in range(2))
    heard: list[str] = []
    hooked.register_hook(lambda gradient: heard.extend(["run"]))
    vars(plain).update(older="kept")
    with python_left_alone(sys._getframe()):
        hooked.register_hook(lambda gradient: heard.extend(["replay"]))
        plain.register_hook(lambda gradient: heard.extend(["replay"]))
        plain.register_post_accumulate_grad_hook(lambda parameter: heard.extend(["replay"]))
        vars(plain).update(older="lost", newer="lost")
        (hooked + plain).sum().backward()
        hooked.grad = plain.grad = None
    (hooked + plain).sum().backward()
    assert heard == ["run"]
    assert vars(plain) == {"older": "kept"}


def test_hooks_of_all_modules_and_optimizers_are_what_they_were() -> None:
    before = register_module_forward_hook(lambda *_: None)
    with python_left_alone(sys._getframe()):
        before.remove()
        register_module_forward_hook(lambda *_: None)
        register_optimizer_step_post_hook(lambda *_: None)
    hooks, count = list(nn_module._global_forward_hooks), len(_global_optimizer_post_hooks)
    before.remove()
    assert hooks == [before.id]
    assert count == 0


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_parametrization_is_what_it_was(*, is_removed: bool) -> None:
    module, bounded = torch.nn.Linear(2, 2), torch.nn.Tanh()
    if is_removed:
        parametrize.register_parametrization(module, "weight", bounded)
    kind, names, weight = type(module), {*module.__dict__, *module._parameters}, module.weight
    with python_left_alone(sys._getframe()):
        if is_removed:
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        else:
            parametrize.register_parametrization(module, "weight", bounded)
    assert type(module) is kind
    assert {*module.__dict__, *module._parameters} == names
    assert torch.equal(module.weight, weight)


def test_an_array_that_may_show_foreign_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    series = numpy.zeros(8, "float32")
    windows = numpy.lib.stride_tricks.as_strided(series, (5, 4), (4, 4))
    part = series[::2]
    copied: list[Any] = []
    monkeypatch.setattr(python_state, "array", lambda value: copied.append(value) or (lambda: None))
    with python_left_alone(sys._getframe()):
        pass
    assert {id(series), id(part)} <= set(map(id, copied))
    assert id(windows) not in set(map(id, copied))


def test_a_full_cache_gives_the_results_of_the_run() -> None:
    calls = []

    @functools.lru_cache(maxsize=3)
    def double(number: int) -> int:
        calls.append(number)
        return 2 * number

    known = [double(number) for number in range(3)]
    with sealed(), python_left_alone(sys._getframe()):
        assert double(2) == 4
        with pytest.raises(Refused):
            double(9)

    assert [double(number) for number in range(3)] == known
    assert calls == [0, 1, 2]


def test_iterators_that_c_reads_are_where_they_were() -> None:
    stream, lines = (number for number in range(9)), zip("abcdef", range(6), strict=True)
    kept: dict[str, Any] = {"stream": stream, "lines": [lines]}
    with sealed(), python_left_alone(sys._getframe()) as noted:
        names: dict[str, Any] = {"stream": stream}
        noted.guard(names)
        for each in (names["stream"], kept["stream"], kept["lines"][0]):
            with pytest.raises(Refused):
                list(itertools.islice(each, 2))

    assert kept["stream"] is stream
    assert (next(stream), next(lines)) == (0, ("a", 0))


def test_variables_of_executed_code_are_what_they_were() -> None:
    space: dict[str, Any] = {}
    exec("total = 0\ndef add():\n    global total\n    total += 1", space)
    add = space.pop("add")
    with python_left_alone(sys._getframe()):
        add()

    assert add.__globals__["total"] == 0
