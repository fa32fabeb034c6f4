"""A fault of ours is told once, and is nobody else's problem."""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchmedic import contained as containment
from torchmedic.contained import contained, tolerant
from torchmedic.records import Fault


@pytest.fixture
def told() -> Iterator[list[Fault]]:
    faults: list[Fault] = []
    containment.on_fault(faults.append)
    yield faults
    containment.on_fault(None)


def test_a_fault_is_told_once_and_the_hook_rests(told: list[Fault]) -> None:
    calls = []

    @contained("test.rests")
    def hook(number: int) -> int:
        calls.append(number)
        if number == 1:
            raise ValueError("of ours")
        return number

    assert [hook(0), hook(1), hook(2)] == [0, None, None]
    assert calls == [0, 1]
    assert [(fault.where, fault.error) for fault in told] == [("test.rests", "ValueError: of ours")]
    assert "in hook" in told[0].traceback


@pytest.mark.parametrize("computes", [True, False])
def test_only_a_hook_that_computes_is_hidden_from_modes(monkeypatch: pytest.MonkeyPatch, computes: bool) -> None:
    hidden: list[str] = []

    def hide() -> Callable[[], None]:
        hidden.append("begin")
        return lambda: hidden.append("end")

    monkeypatch.setattr(containment, "has_dispatch_modes", lambda: 1)
    monkeypatch.setattr(containment, "hide", hide)

    @contained("test.hidden", computes=computes)
    def hook() -> list[str]:
        return list(hidden)

    assert hook() == (["begin"] if computes else [])
    assert hidden == (["begin", "end"] if computes else [])


def test_the_user_can_interrupt_a_hook(told: list[Fault]) -> None:
    @contained("test.interrupt")
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()
    assert told == []


def test_an_exception_of_a_signal_handler_is_not_ours(told: list[Fault]) -> None:
    def handler(*_: object) -> None:
        raise RuntimeError("of the user's handler")

    @contained("test.handler")
    def hook() -> None:
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="of the user's handler"):
            hook()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == []


def test_a_stack_that_is_nearly_used_up_is_no_fault(told: list[Fault]) -> None:
    @contained("test.deep")
    def hook(depth: int) -> int:
        return down(depth)

    def down(depth: int) -> int:
        return 0 if depth == 0 else down(depth - 1)

    assert hook(100_000) is None
    assert hook(3) == 0
    assert told == []


def test_a_reporter_that_fails_is_contained_too() -> None:
    def fails(_: Fault) -> None:
        raise OSError("disk full")

    @contained("test.reporter")
    def hook() -> None:
        raise ValueError

    containment.on_fault(fails)
    try:
        assert hook() is None
    finally:
        containment.on_fault(None)


def test_what_a_signal_handler_raises_is_not_suppressed() -> None:
    class TooLate(Exception):
        pass

    def late(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGUSR1, late)
    try:
        with tolerant:
            raise ValueError("of an object that is looked at")
        with pytest.raises(TooLate), tolerant:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_is_sent_to_a_thread_arrives() -> None:
    class Stop(Exception):
        pass

    names: dict[str, Any] = {"__name__": "torchmedic.hooks"}
    exec("def hook(send, *given):\n    send(*given)\n    return [each for each in range(9)]", names)
    call = functools.partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.c_ulong(threading.get_ident()))

    with pytest.raises(Stop):
        contained("test.sent")(names["hook"])(call, ctypes.py_object(Stop))
