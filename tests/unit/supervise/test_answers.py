"""Who works on an answer is waited for, on a machine that is taken; who cannot give one is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import awaited, child, linux_only, seen

from torchmedic.records.inside import InsideView
from torchmedic.records.process import ProcessView
from torchmedic.runfolder import questions
from torchmedic.supervise.stall import examination
from torchmedic.supervise.stall.examination import Answers

pytestmark = linux_only

LISTENS = """
import ctypes, threading, time
def listen():
    ctypes.CDLL(None).prctl(15, b"torchmedic", 0, 0, 0)
    {does}
threading.Thread(target=listen, daemon=True).start()
time.sleep(1000)
"""


def _listens(view: ProcessView) -> bool:
    return view.listener is not None and view.listener.syscall in ("running", "clock_nanosleep")


def _heard(run: Path, pid: int) -> Answers:
    (run / questions.FOLDER).mkdir(exist_ok=True)
    questions.heard(run, pid).touch()
    return Answers(run, [pid])


def test_a_thread_that_is_at_it_is_waited_for(tmp_path: Path) -> None:
    with child(LISTENS.format(does="while True: pass")) as started:
        view = seen(started.pid, _listens)
        asked = _heard(tmp_path, started.pid)
        assert asked.pending([view], 20.0)
        assert asked.pending([view], 59.0)
        assert not asked.pending([view], 61.0), "not for ever"
        questions.write(tmp_path, InsideView(pid=started.pid, time=0.0))
        assert not asked.pending([view], 1.0), "it has answered"


def test_a_thread_that_stands_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_MAX_PAUSE_SECONDS", 0.1)
    with child(LISTENS.format(does="time.sleep(1000)")) as started:
        view = seen(started.pid, _listens)
        asked = _heard(tmp_path, started.pid)
        assert asked.pending([view], 7.0)
        awaited(lambda: not asked.pending([view], 20.0))
        assert not Answers(tmp_path, []).pending([view], 1.0), "it was not asked"
        questions.heard(tmp_path, started.pid).unlink()
        assert asked.pending([view], 1.0)
        assert not asked.pending([view], 3.0), "it has not heard"
