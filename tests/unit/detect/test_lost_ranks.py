"""A rank that only noticed that another one is gone says nothing of its own, however late that one is explained."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from torchmedic.observe.step import blackbox
from torchmedic.observe.step.blackbox import FileBox
from torchmedic.records import Diagnosis, Outcome, Report
from torchmedic.runfolder import events, files
from torchmedic.supervise import deaths, findings
from torchmedic.supervise.findings import Findings

DEAD = 2**30  # no process has this number
LOST = Diagnosis(code="TM900", name="cause-not-known", grade="possible", message="Connection closed by peer", cause="")
KILLED = Diagnosis(code="TM805", name="killed", grade="likely", message="it was killed", cause="", rank=1)
ENDED = Outcome(exit_status=137, symptom="death")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rank 1 is dead, and rank 0 has lost its connection to it."""
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(blackbox.os, "getpid", lambda rank=rank: DEAD + rank)
            FileBox(folder / files.BLACK_BOX)
    lines: list[dict[str, Any]] = [{"kind": "start", "pid": DEAD}, {"kind": "lost-rank", "rank": 0}]
    (tmp_path / "rank0" / events.EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    files.write_diagnosis(tmp_path / "rank0", LOST)
    return tmp_path


def told_of_rank_0(run: Path) -> list[Diagnosis]:
    found = Findings(run, 0)
    assert found.new() == []
    return found.roots([])


def test_the_parent_of_the_other_rank_is_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MAX_WAIT_SECONDS", 100.0)

    def conclude() -> None:
        time.sleep(0.3)
        files.write_part(run, 1, Report(diagnoses=(KILLED,), outcome=ENDED))

    late = threading.Thread(target=conclude)
    late.start()
    assert told_of_rank_0(run) == []
    late.join()


def test_a_silent_mistake_of_its_own_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    files.write_diagnosis(tmp_path / "rank0", msgspec.structs.replace(KILLED, code="TM601", rank=0))
    files.write_diagnosis(tmp_path / "rank0", LOST)
    for rank in (None, 0):
        found = Findings(tmp_path, rank)
        assert [each.code for each in found.new()] == ["TM601"]
        assert found.roots([]) == [LOST]


def test_it_is_told_if_nobody_can_say_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_MAX_WAIT_SECONDS", 0.3)
    assert told_of_rank_0(run) == [LOST], "its parent says nothing"
    monkeypatch.setattr(findings, "_MAX_WAIT_SECONDS", 100.0)
    files.write_part(run, 1, Report(outcome=ENDED))
    assert told_of_rank_0(run) == [LOST], "its parent does not know either"
    files.write_diagnosis(run / "rank1", LOST)
    assert told_of_rank_0(run) == [LOST], "nor does it know itself"
    files.write_diagnosis(run / "rank1", msgspec.structs.replace(KILLED, code="TM601", name="gradients-never-cleared"))
    assert told_of_rank_0(run) == [LOST], "what raises nothing is no reason"


def test_it_does_not_hide_a_death_from_a_parent_of_both(run: Path) -> None:
    host: Any = SimpleNamespace(ended={DEAD: 1, DEAD + 1: -9})
    left = deaths.read_traces(run, [run / "rank0", run / "rank1"])
    assert deaths._signals(left, host, 1, 1, through_shell=True) == {DEAD + 1: "SIGKILL"}
    files.write_diagnosis(run / "rank1", LOST)
    assert deaths._signals(left, host, 1, 1, through_shell=True) == {}, "it has failed by itself"
