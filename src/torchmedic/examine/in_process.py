"""Diagnose a failing step inside its own process, and leave the result in the run folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torchmedic.detect.failures.device_errors import DeviceFault, device_fault_of
from torchmedic.detect.failures.echoes import is_echo
from torchmedic.detect.failures.exceptions import raised
from torchmedic.detect.failures.nonfinite import At, What, turned_bad
from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.diagnose import registry
from torchmedic.diagnose.cures import memory
from torchmedic.diagnose.engine import ask, ask_each, diagnose, find
from torchmedic.diagnose.rule import Finding
from torchmedic.diagnose.rules.cause_not_known import CODE, not_explained
from torchmedic.diagnose.suppression import is_suppressed
from torchmedic.evidence.check_up import CheckUp
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.evidence.leaks.held_lines import with_lines
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.evidence.lost_device.evidence import LostDevice, lost_context
from torchmedic.evidence.memory.autopsy import examine_memory
from torchmedic.evidence.memory.cures.forked import ForkedTrials, Proof
from torchmedic.evidence.memory.table import record_of
from torchmedic.evidence.number_exception import EchoEvidence, asks_about_number, complains_of_number
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.spoiled_weights import trace_back
from torchmedic.examine import exhausted_worker
from torchmedic.examine.lost_device import explain
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.heap.growth_watch import Look
from torchmedic.observe.heap.walk import Held
from torchmedic.observe.step.batches import tensors_in_frames
from torchmedic.records import Diagnosis
from torchmedic.repro import recorder
from torchmedic.runfolder.files import next_diagnosis, read_diagnoses, release, write_diagnosis
from torchmedic.runfolder.layout import is_confidential, worker_folders
from torchmedic.source.live_frames import Frame
from torchmedic.source.user_code import user_frame

# The operation behind a diagnosis that is not published yet.
_waiting: list[tuple[Diagnosis, recorder.Recording | None]] = []

# What has been said of mistakes that raise nothing: code and line.
_said: set[tuple[str, str, int]] = set()
_holders_said: set[str] = set()  # and of what grows


def exception(error: BaseException, agent: Any) -> None:
    """Called by the agent while the frames of `error` are alive."""
    release(agent.folder)
    if not is_echo(error, agent):
        with warnings.catch_warnings():
            # To look at everything in reach also touches what libraries have deprecated; the user may have made that
            # an error.
            warnings.simplefilter("ignore")
            explained = _explain_exception(error, agent)
            if explained is not None:
                _try_and_write(error, *explained, agent.folder)


def _try_and_write(error: BaseException, diagnosis: Diagnosis, trials: ForkedTrials | None, folder: Path) -> None:
    proofs: list[Proof] = []
    try:
        if trials is not None:
            proofs = trials.run(error)
    finally:  # whoever interrupts the trials still wants to know
        write_diagnosis(folder, memory.after_trials(diagnosis, proofs) if proofs else diagnosis)


def _explain_exception(error: BaseException, agent: Any) -> tuple[Diagnosis, ForkedTrials | None] | None:
    """The diagnosis, and what is to be tried once all that it was made from has gone; None where there is neither."""
    fault = device_fault_of(error)
    if fault is not None and fault.may_be_echo:
        fault = device_fault_of(lost_context()) or fault  # a library that only noticed
    if fault is not None and fault.sticky:
        _lost(error, fault, agent)
        return None
    incident = raised(error, agent)
    evidence = RaisedEvidence(incident)
    evidence.autopsy = autopsy = examine_memory(evidence)
    told = exhausted_worker.told(evidence)
    found = find(evidence, registry.RAISED) if told is None else Finding(told)
    diagnosis = found.diagnosis if found is not None else not_explained(evidence)
    if diagnosis.grade != "proven" and complains_of_number(evidence):
        if not agent.finite.on:
            agent.events.write("echo", code=diagnosis.code, step=incident.step)
            return None  # the weights are NaN since a step that has been explained
        diagnosis = _older(EchoEvidence.of_exception(evidence)) or diagnosis
    if diagnosis.code == CODE and evidence.exhaustion is not None:
        raise MemoryError  # of memory that has run out there is a rule that always speaks, if it has any itself
    agent.events.write("exception", symptom=incident.symptom, step=incident.step, phase=incident.phase)
    if autopsy is not None:
        agent.events.write("memory-autopsy", step=incident.step, **record_of(autopsy))
    recording = recorder.of_exception(evidence, diagnosis, agent)
    if recording is not None:
        recording.write(agent.folder, next_diagnosis(agent.folder))
    plan = found.plan if found is not None and found.diagnosis is diagnosis else None
    return diagnosis, plan.prepare(autopsy) if plan is not None and autopsy is not None else None


def device_died(error: BaseException, frame: FrameType, agent: Any) -> None:
    """Called by the agent when a device is found dead before the user's own code has come to notice it."""
    fault = device_fault_of(error)
    if fault is not None and fault.sticky:
        release(agent.folder)
        _lost(error, fault, agent, frame)


def _lost(error: BaseException, fault: DeviceFault, agent: Any, frame: FrameType | None = None) -> None:
    batches = agent.batches.recent()
    incident = raised(error, agent)
    agent.events.write("exception", symptom=incident.symptom, step=incident.step, phase=incident.phase)
    if agent.device_lost:
        return  # it has been explained: what comes now is its echo
    agent.device_lost = True
    with LostDevice(incident, fault, batches, frame) as lost:
        lost.replay()
        diagnosis, evidence = explain(lost)
        number = write_diagnosis(agent.folder, diagnosis)
        recording = recorder.of_exception(evidence, diagnosis, agent) if evidence is not None else None
        if recording is not None:
            recording.write(agent.folder, number)


def _older(evidence: EchoEvidence) -> Diagnosis | None:
    """The origin of the number that an exception complains of."""
    evidence.replay()
    diagnosis = diagnose(evidence, registry.NUMBERS) if evidence.births else None
    return diagnosis if diagnosis is not None and diagnosis.grade != "possible" else None


def gave_up(frame: FrameType, agent: Any) -> None:
    """Called when the script leaves by `sys.exit`: perhaps because it saw a number that is not finite."""
    user = user_frame(frame)
    if user is None or not agent.finite.on or not asks_about_number(Frame(user, user.f_lasti, user.f_lineno)):
        return
    diagnosis = _older(EchoEvidence.of_exit(frame, agent))
    if diagnosis is not None:
        agent.finite.on = False
        publish(diagnosis, agent)


def nonfinite(optimizer: Any, frame: FrameType, what: What, at: At, agent: Any) -> Diagnosis:
    """Called by the agent when a number is NaN or infinite; the frames of the step are on the stack."""
    agent.batches.settle(tensors_in_frames(frame))
    incident = turned_bad(optimizer, what, at, agent)
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    evidence.replay()
    evidence = trace_back(evidence, frame)
    try:
        diagnosis = diagnose(evidence, registry.NUMBERS)
        _waiting[:] = [(diagnosis, recorder.of_numbers(evidence, diagnosis, agent))]
    finally:
        evidence.restore_weights()
    return diagnosis


def publish(diagnosis: Diagnosis, agent: Any) -> None:
    """Called when the bad number is about to reach the weights, or has reached them."""
    agent.events.write("nonfinite", symptom="nan", step=diagnosis.step)
    number = write_diagnosis(agent.folder, diagnosis)
    for known, recording in _waiting:
        if known is diagnosis and recording is not None:
            recording.write(agent.folder, number)
    _waiting.clear()


def silent(incidents: list[LoopIncident], agent: Any) -> None:
    """Called by the agent when the loop is seen to do what cannot be meant. The run goes on."""
    for incident in incidents:
        diagnosis = ask(LoopEvidence(incident, agent), registry.SILENT)
        if diagnosis is not None:
            publish_silent(diagnosis, agent)


def check_up(graphs: Sequence[LossGraph], unreached: Unreached | None, frame: FrameType | None, agent: Any) -> None:
    """Called by the agent when the first steps have been looked at. The run goes on."""
    optimized = [
        tensor for optimizer in agent.clock.optimizers for group in optimizer.param_groups for tensor in group["params"]
    ]
    evidence = CheckUp(graphs, frame, optimized=optimized, unreached=unreached, rank=agent.rank)
    for diagnosis in ask_each(evidence, registry.CHECKUP):
        publish_silent(diagnosis, agent)


def growing(found: list[Growth], looks: list[Look], frame: FrameType, agent: Any) -> None:
    """Called by the agent when some holders of the user's grow and grow. The run goes on."""
    found.sort(key=lambda growth: not growth.held.inner)  # of two words on one holder, that which knows more of it
    diagnoses = [
        (growth.held.name, diagnosis)
        for growth in found
        if (diagnosis := ask(LeakEvidence(growth, looks, frame, agent), registry.GROWING)) is not None
    ]
    for name, diagnosis in diagnoses:
        cause = diagnosis.cause_location
        said = cause is not None and any(each[1:] == (cause.file, cause.line) for each in _said)
        if not said and name not in _holders_said and not _said_by_a_worker(diagnosis, agent.run):
            _holders_said.add(name)
            publish_silent(diagnosis, agent)


def _said_by_a_worker(diagnosis: Diagnosis, run: Path) -> bool:
    """Every pass over the data may start workers anew, each of which finds the same."""
    told = (found for folder in worker_folders(run) for found in read_diagnoses(folder).values())
    return any(
        found.cause_location is not None
        and diagnosis.cause_location is not None
        and (found.code, found.cause_location.line) == (diagnosis.code, diagnosis.cause_location.line)
        for found in told
    )


def holding(found: list[tuple[Held, int]], agent: Any) -> None:
    """Called by the agent when memory is short. The parent reads it, also if this process does not live to say more."""
    if not is_confidential(agent.run):
        agent.open()
        agent.events.write("holders", step=agent.clock.step, holders=with_lines(found))


def publish_silent(diagnosis: Diagnosis, agent: Any) -> None:
    """Say of a mistake that raises nothing, once per code and line, unless the user has said not to."""
    cause = diagnosis.cause_location
    key = (diagnosis.code, cause.file, cause.line) if cause is not None else (diagnosis.code, "", 0)
    if key in _said or is_suppressed(diagnosis):
        return
    _said.add(key)
    agent.open()
    agent.events.write("silent", code=diagnosis.code, step=diagnosis.step)
    write_diagnosis(agent.folder, diagnosis)
