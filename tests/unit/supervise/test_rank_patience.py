"""How long a rank that waits for another is not told: until the parent of the other could have explained it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchmedic.records.ranks import Collective, Difference, Fate, Job, RankState
from torchmedic.supervise import ranks

LIMIT = 30.0


def may_wait(monkeypatch: pytest.MonkeyPatch, still: float, *, longer: float = 0.0, fate: Fate = "running") -> bool:
    """Whether rank 0, which has stood for `still` seconds, is not told yet; rank 1 went on `longer` than rank 0."""
    late = RankState(rank=1, fate=fate, moved=time.time() - still + longer)
    stopped = Difference(
        kind="stopped",
        group="0",
        culprits=(1,),
        others=(0,),
        call=None,
        expected=Collective(op="all_reduce"),
        before=None,
        index=0,
        by="end",
    )
    job = Job(world_size=2, ranks=(RankState(rank=0), late), difference=stopped)
    monkeypatch.setattr(ranks, "read_job", lambda run: job)
    return ranks.seconds_to_explain(Path("run"), 0, still, LIMIT) > 0


def test_a_wait_is_told_within_five_seconds_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_wait(monkeypatch, LIMIT + 1)
    assert not may_wait(monkeypatch, LIMIT + 4)
    assert not may_wait(monkeypatch, LIMIT + 1, fate="ended")  # nobody examines that one any more


def test_a_rank_that_went_on_longer_is_examined_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_wait(monkeypatch, LIMIT + 10, longer=10)
    assert not may_wait(monkeypatch, LIMIT + 15, longer=10)
    assert not may_wait(monkeypatch, 2 * LIMIT + 5, longer=2 * LIMIT)  # not for ever
