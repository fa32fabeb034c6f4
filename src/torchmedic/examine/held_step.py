"""Keep the failing step alive for a while, and try the patches that come in on it (`run --hold SECONDS`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from torchmedic.contained import report_fault
from torchmedic.observe.context import ProcessContext
from torchmedic.records import Diagnosis
from torchmedic.replay.step.step import Step
from torchmedic.runfolder import held
from torchmedic.runfolder.held import HeldStep, PatchResult
from torchmedic.source.segment.cut import CannotCut


def hold(step: Callable[[], Step | None], diagnosis: Diagnosis, agent: ProcessContext) -> None:
    """Wait for patches, if the run was started so; returns when the time is up or the process is released."""
    seconds = held.seconds_to_hold(agent.run)
    if not seconds or diagnosis.severity != "error":
        return
    try:
        kept = step()
    except CannotCut:
        kept = None
    if kept is None:
        return
    record = HeldStep(pid=os.getpid(), code=diagnosis.code, step=diagnosis.step, until=time.time() + seconds)
    with held.announced(agent.run, record):
        for number, patch in held.patches(agent.run, record):
            held.answer(agent.run, record, number, _tried(kept, patch))


def _tried(step: Step, patch: str) -> PatchResult:
    from torchmedic.replay.step.patched import attempt_patch
    from torchmedic.source.unified_diff import BadPatch

    try:
        verdict = attempt_patch(step, patch)
    except (BadPatch, CannotCut) as reason:
        return PatchResult(refused=str(reason))
    except Exception as error:
        report_fault("examine.held_step", error)
        return PatchResult(refused=f"torchmedic could not try it: {type(error).__name__}")
    return PatchResult(passed=verdict.passed, result=verdict.result)
