"""Held steps: patches and answers find each other, and a waiting process is not taken for a hung one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from torchmedic.runfolder import held, layout, questions
from torchmedic.runfolder.held import HeldStep, PatchResult


def test_patches_and_answers_find_each_other(tmp_path: Path) -> None:
    step = HeldStep(pid=os.getpid(), code="TM201", step=3, until=time.time() + 60)
    layout.new_folder(tmp_path / questions.FOLDER)
    busy = questions.busy(tmp_path, step.pid)
    layout.mark(busy)
    os.utime(busy, (1, 1))
    ready = threading.Event()

    def process() -> None:
        with held.announced(tmp_path, step):
            ready.set()
            for number, patch in held.patches(tmp_path, step):
                held.answer(tmp_path, step, number, PatchResult(passed=patch == "good", result=f"{number}: {patch}"))

    thread = threading.Thread(target=process)
    thread.start()
    ready.wait(30)
    assert held.held_steps(tmp_path) == [step]
    assert held.try_patch(tmp_path, step, "good", 30) == PatchResult(passed=True, result="0: good")
    assert held.try_patch(tmp_path, step, "bad", 30) == PatchResult(passed=False, result="1: bad")
    held.release(tmp_path)
    thread.join(30)
    assert not thread.is_alive()
    assert held.held_steps(tmp_path) == []
    assert busy.stat().st_mtime > 1  # the parent sees that the process is held on purpose


def test_a_step_is_held_only_if_the_run_was_started_so(tmp_path: Path) -> None:
    assert held.seconds_to_hold(tmp_path) == 0
    held.mark(tmp_path, 2.5)
    assert held.seconds_to_hold(tmp_path) == 2.5
    (tmp_path / ".hold").write_text("nonsense")
    assert held.seconds_to_hold(tmp_path) == 0


def test_a_step_of_a_process_that_is_gone_is_not_held(tmp_path: Path) -> None:
    gone = HeldStep(pid=(1 << 22) + 1, code="TM201", until=time.time() + 60)
    with held.announced(tmp_path, gone):
        assert held.held_steps(tmp_path) == []
        assert "has ended" in held.try_patch(tmp_path, gone, "x", 5).refused
