"""An exception that ended the work: explained while its frames are alive."""

from __future__ import annotations

import multiprocessing
import threading
import warnings
from pathlib import Path

import msgspec

from torchmedic.detect.failures.device_errors import device_fault_of
from torchmedic.detect.failures.echoes import ask_other_ranks, is_echo
from torchmedic.detect.failures.exceptions import raised
from torchmedic.diagnose import registry
from torchmedic.diagnose.cures import memory
from torchmedic.diagnose.engine import find
from torchmedic.diagnose.rule import RuleAnswer
from torchmedic.diagnose.rules import cause_not_known
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.lost_device.evidence import lost_context
from torchmedic.evidence.memory.autopsy import examine_memory
from torchmedic.evidence.memory.cures.forked import ForkedTrials, Proof
from torchmedic.evidence.memory.table import record_of
from torchmedic.evidence.number_exception import EchoEvidence, complains_of_number, follows_runaway
from torchmedic.examine.exhausted_worker import diagnosis_of_worker
from torchmedic.examine.held_step import hold
from torchmedic.examine.lost_device import explain_loss
from torchmedic.examine.nonfinite import older_origin, runaway_before
from torchmedic.observe.context import ProcessContext
from torchmedic.records import Diagnosis, Grade
from torchmedic.replay.step.step import Step, from_traceback, through_backward
from torchmedic.repro import recorder
from torchmedic.runfolder.files import next_diagnosis, release, write_diagnosis
from torchmedic.source.live_frames import frames_of_traceback
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import has_changed, is_user_file, relative


def explain_exception(error: BaseException, agent: ProcessContext) -> None:
    """Explain an exception, unless it is only the echo of what another process has explained."""
    folder = agent.open().path
    release(folder)
    ask_other_ranks(error, agent)
    if is_echo(error, agent):
        return
    with warnings.catch_warnings():
        # To look at everything in reach also touches what libraries have deprecated; the user may have made that an
        # error.
        warnings.simplefilter("ignore")
        explained = _explain(error, agent)
        if explained is not None:
            diagnosis, trials = explained
            diagnosis = _without_changed_lines(diagnosis, error)
            _try_and_write(error, diagnosis, trials, folder)
            if trials is None:  # memory is short otherwise
                hold(lambda: _failing_step(error, agent), diagnosis, agent)


def _without_changed_lines(diagnosis: Diagnosis, error: BaseException) -> Diagnosis:
    """A diagnosis that tells of files which the user has edited since they were imported, as their lines are shown."""
    codes = {frame.f_code for frame, *_ in frames_of_traceback(error.__traceback__)}
    changed = {relative(code.co_filename) for code in codes if is_user_file(code.co_filename) and has_changed(code)}
    changed &= {place.file for place in diagnosis.locations}
    notes = (
        f"{file} was changed during the run: the lines shown may not be those that ran" for file in sorted(changed)
    )
    grade: Grade = "likely" if changed and diagnosis.grade == "proven" else diagnosis.grade
    return msgspec.structs.replace(diagnosis, grade=grade, evidence=(*diagnosis.evidence, *notes))


def _failing_step(error: BaseException, agent: ProcessContext) -> Step:
    """The step that an exception has ended, as far as it would have gone backward."""
    try:
        return through_backward(frames_of_traceback(error.__traceback__), agent)
    except CannotCut:
        return from_traceback(error.__traceback__, agent)


def _explain(error: BaseException, agent: ProcessContext) -> tuple[Diagnosis, ForkedTrials | None] | None:
    """The diagnosis, and the trials of its cures to run once the evidence is freed; None if it is already written."""
    fault = device_fault_of(error)
    if fault is not None and fault.may_be_echo:
        fault = device_fault_of(lost_context()) or fault  # a library that only noticed
    if fault is not None and fault.sticky:
        explain_loss(error, fault, agent)
        return None
    incident = raised(error, agent)
    evidence = RaisedEvidence(incident)
    evidence.autopsy = autopsy = examine_memory(evidence)
    told = diagnosis_of_worker(evidence)
    answer = find(evidence, registry.RAISED) if told is None else RuleAnswer(told)
    if (answer is None or answer.diagnosis.grade != "proven") and evidence.replay_operands():
        answer = find(evidence, registry.RAISED)
    diagnosis = answer.diagnosis if answer is not None else cause_not_known.not_explained(evidence)
    folder = agent.open()
    if diagnosis.grade != "proven" and complains_of_number(evidence):
        if not agent.finite.on:
            folder.events.write("echo", code=diagnosis.code, step=incident.step)
            return None  # the weights are NaN since a step that has been explained
        diagnosis = older_origin(EchoEvidence.of_exception(evidence)) or diagnosis
    elif agent.finite.on and follows_runaway(evidence):
        diagnosis = runaway_before(EchoEvidence.of_exception(evidence)) or diagnosis
    if diagnosis.code == cause_not_known.check.code and evidence.exhaustion is not None:
        # There is a rule that always explains exhausted memory, so it had no memory itself.
        raise MemoryError
    folder.events.write(
        "exception", symptom=incident.symptom, step=incident.step, phase=incident.phase, child=_child_name()
    )
    if autopsy is not None:
        folder.events.write("memory-autopsy", step=incident.step, **record_of(autopsy))
    recording = recorder.of_exception(evidence, diagnosis, agent)
    if recording is not None:
        recording.write(folder.path, next_diagnosis(folder.path))
    plan = answer.plan if answer is not None and answer.diagnosis is diagnosis else None
    return diagnosis, plan.prepare(autopsy) if plan is not None and autopsy is not None else None


def _child_name() -> str:
    """The name of this process if it is a child of `multiprocessing` that the exception ends."""
    if multiprocessing.parent_process() is None or threading.current_thread() is not threading.main_thread():
        return ""
    return multiprocessing.current_process().name


def _try_and_write(error: BaseException, diagnosis: Diagnosis, trials: ForkedTrials | None, folder: Path) -> None:
    proofs: list[Proof] = []
    try:
        if trials is not None:
            proofs = trials.run(error)
    finally:  # whoever interrupts the trials still wants to know
        write_diagnosis(folder, memory.after_trials(diagnosis, proofs) if proofs else diagnosis)
