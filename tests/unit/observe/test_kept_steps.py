"""What is kept of the last backward calls, and which of them are suspected."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from torchmedic.evidence.spoiled_weights import suspects
from torchmedic.observe.budget import Budget
from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.numbers.kept_steps import KeptBackward, KeptBackwards
from torchmedic.observe.numbers.kept_values import GONE, given_back, kept
from torchmedic.observe.numbers.losses import Losses
from torchmedic.observe.numbers.step_memory import StepMemory
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.step_notes import StepNotes, held, line_of


def test_a_small_tensor_is_kept_and_a_big_one_is_not_kept_alive() -> None:
    small, big = torch.ones(4), torch.ones(1 << 20)
    held = kept({"a": small, "b": [1, small]})
    assert given_back(held)["a"] is small
    reference = weakref.ref(big)
    weak = kept(big)
    assert given_back(weak) is big
    del big
    gc.collect()
    assert reference() is None
    assert given_back(weak) is GONE


class Closed:
    """An object that cannot be asked for anything, not even for its class."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_an_object_that_cannot_be_asked_is_not_kept() -> None:
    assert kept(Closed()) is GONE


class Picture:
    """A library's image: it has the interface of an array, and nothing else of one."""

    __array_interface__ = property(lambda self: {"shape": (1,), "typestr": "|u1", "data": b"x", "version": 3})


class Maker:
    """Its `_make` is no named tuple's."""

    def _make(self, items: list[Any]) -> None:
        raise RuntimeError(items)


class Asked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(func)


@pytest.mark.parametrize(
    "value", [Picture(), Maker(), torch.ones(2).as_subclass(Asked)], ids=lambda each: type(each).__name__
)
def test_what_only_looks_like_data_is_not_asked_anything(value: Any) -> None:
    assert kept(value) is GONE
    assert not isinstance(held(value), torch.Tensor)


def test_an_array_is_kept_as_it_was_and_stays_free() -> None:
    array = np.ones(4)
    was = kept({"obs": array, "reward": np.float32(2)})
    array[:] = 5
    array.resize(6)  # refused while anything else refers to it
    assert given_back(was)["obs"].tolist() == [1.0] * 4
    assert given_back(was)["reward"] == 2
    assert kept(np.array([object()])) is GONE
    assert kept(np.ones(1 << 20)) is GONE


class Transition(NamedTuple):
    state: torch.Tensor
    reward: float


def test_a_named_tuple_is_given_back_as_what_it_is() -> None:
    given = Transition(torch.ones(4), 0.5)
    back = given_back(kept(given))
    assert type(back) is Transition
    assert back.state is given.state
    assert back.reward == 0.5


def test_a_tensor_that_was_written_to_since_is_not_given_back() -> None:
    tensor = torch.ones(4)
    held = kept((tensor, 3))
    tensor.add_(1)
    assert given_back(held) is GONE


@pytest.mark.parametrize(
    ("losses", "before", "expected"),
    [
        ([1.0, 2.0], "old", None),  # whatever was bad, the script has dropped it
        ([1.0, math.nan, math.inf], "old", 1),
        ([math.nan, 1.0, math.nan], None, 2),
        ([math.nan, math.nan], None, 0),
        ([math.nan, math.nan], "old", "old"),  # it has gone on since then
    ],
)
def test_losses_that_are_read_together_tell_where_the_bad_ones_began(
    losses: list[float], before: Any, expected: Any
) -> None:
    found = Losses(cast(KeptBackwards, None), cast(StepMemory, None), lambda what: None)
    found.bad_call = before
    calls = [cast(KeptBackward, SimpleNamespace(loss=None)) for _ in losses]
    found._take_held(losses, calls, "line")
    assert found.bad_call is (calls[expected] if isinstance(expected, int) else expected)
    assert repr([call.loss for call in calls]) == repr(losses) == repr(list(found.trends["line"]))


def test_no_graph_is_kept() -> None:
    assert kept(torch.ones(3, requires_grad=True) * 2) is GONE


def test_big_batches_are_let_go_of_from_the_oldest() -> None:
    batches = Batches()
    kept_backwards = KeptBackwards(StepNotes(), batches, Clock())
    calls = []
    for number in range(4):
        batches.arrived([torch.zeros(7 << 20)])  # 28 MiB
        calls.append(kept_backwards.record(sys._getframe(), number))
    assert [call.batch is not None for call in calls] == [False, False, True, True]


def test_a_batch_on_the_device_is_not_kept() -> None:
    batches = Batches()
    batches.arrived([torch.zeros(4, device="meta")])
    assert KeptBackwards(StepNotes(), batches, Clock()).record(sys._getframe(), 0).batch is None


def call(update: int) -> KeptBackward:
    return KeptBackward(StepNotes(), Batches(), 0, update)


def test_the_calls_of_the_update_before_are_suspected_first_and_in_order() -> None:
    first, second, third, fourth, bad = call(0), call(1), call(1), call(1), call(2)
    assert suspects([first, second, third, fourth, bad], bad) == [second, third, fourth, first]


def test_of_a_closure_the_call_before_is_suspected_first() -> None:
    first, second, bad, later = call(1), call(1), call(1), call(1)
    assert suspects([first, second, bad, later], bad) == [second, first, bad]


def test_the_line_of_an_instruction_is_that_of_the_frame() -> None:
    frame = sys._getframe()
    assert line_of(frame.f_code, frame.f_lasti) == frame.f_lineno


class Examiner:
    def __init__(self) -> None:
        self.deaths: list[BaseException] = []

    def device_died(self, error: BaseException, frame: Any) -> None:
        self.deaths.append(error)

    def usual_step(self) -> tuple[int, float]:
        return 0, 1.0

    def mark(self, what: str) -> None:
        pass


class Dying:
    """A device that fails when it is first asked."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def place(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return torch.empty((), dtype=dtype), self

    def arrange(self, host: torch.Tensor, event: Any, value: torch.Tensor) -> None:
        return None

    def may_work(self) -> bool:
        return True


def test_a_device_that_dies_is_told_of_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_devices, "devices", {"cpu": Dying(), "cuda": Dying()})
    monkeypatch.setattr(async_devices, "_dead", [])
    monkeypatch.setattr(async_devices, "_never_free", lambda value: None)
    notes, batches, clock = StepNotes(), Batches(), Clock()
    examiner = Examiner()
    watch = FiniteWatch(examiner, KeptBackwards(notes, batches, clock), Rewind(), Budget())  # type: ignore[arg-type]
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch.backward_begins([weight.sum()], ("train.py", 1), sys._getframe())
    watch.step_begins(optimizer, sys._getframe(), lambda: [optimizer])

    assert [str(error) for error in examiner.deaths] == ["CUDA error: device-side assert triggered"]
    assert not watch.on
    assert async_devices.device_is_lost()
    assert "cuda" not in async_devices.devices
    watch.device_failed(RuntimeError("CUDA error: again"), sys._getframe())
    assert len(examiner.deaths) == 1
