"""Whether a folder has something new: never "no" where there is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from torchmedic.supervise import folder_news

SECOND = 1_000_000_000
BEGIN = 1_000_000 * SECOND


class Clock:
    now = BEGIN

    def time_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(folder_news, "time", stopped)
    return stopped


def change(folder: Path, when: int) -> None:
    os.utime(folder, ns=(when, when))


def test_a_quiet_folder_is_looked_into_every_ten_seconds(tmp_path: Path, clock: Clock) -> None:
    change(tmp_path, BEGIN - 5 * SECOND)
    asked = folder_news.FolderNews()
    answers = []
    for tick in range(9):
        clock.now = BEGIN + tick * 5 * SECOND // 2
        answers.append(asked.may_have_changed(tmp_path))

    assert answers == [True, False, False, False] * 2 + [True]


def test_a_change_is_seen_at_once_also_where_time_is_coarse(tmp_path: Path, clock: Clock) -> None:
    change(tmp_path, BEGIN - 5 * SECOND)
    asked = folder_news.FolderNews()
    asked.may_have_changed(tmp_path)
    clock.now += SECOND // 4
    change(tmp_path, BEGIN)

    assert asked.may_have_changed(tmp_path)
    clock.now += SECOND // 4
    assert asked.may_have_changed(tmp_path)  # another change could have been given the same time


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    asked = folder_news.FolderNews()
    folder = tmp_path / "later"
    assert asked.may_have_changed(folder)
    folder.mkdir()
    change(folder, time.time_ns())
    assert asked.may_have_changed(folder)
