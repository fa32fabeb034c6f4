"""A forked copy that looks: how long it is waited for goes by what it does, not by the clock of a busy machine."""

from __future__ import annotations

import time

import pytest

from torchmedic.observe.failures import forked_look


def test_what_it_has_seen() -> None:
    assert forked_look.seen_by_copy(lambda: b"x" * 100_000) == b"x" * 100_000


def test_one_that_waits_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_look, "_MAX_IDLE_SECONDS", 0.3)

    def look() -> bytes:
        time.sleep(1000)
        return b"never"

    assert forked_look.seen_by_copy(look) == b""


def test_one_that_never_ends_its_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_look, "_MAX_CPU_SECONDS", 0.1)

    def look() -> bytes:
        while True:
            pass

    assert forked_look.seen_by_copy(look) == b""
