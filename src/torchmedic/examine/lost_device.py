"""A device that died under a step: explained by a shadow of the step on the CPU, the kernel's words and the marks."""

from __future__ import annotations

from types import FrameType

import msgspec

from torchmedic.detect.failures.device_errors import DeviceFault, device_fault_of
from torchmedic.detect.failures.exceptions import raised
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask, diagnose
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.evidence.lost_device.kernel_match import Confirmation, confirm
from torchmedic.evidence.lost_device.shadow_evidence import ShadowEvidence
from torchmedic.evidence.memory.autopsy import examine_memory
from torchmedic.evidence.number_exception import EchoEvidence, complains_of_number
from torchmedic.observe.context import ProcessContext
from torchmedic.records import Diagnosis, Grade, Treatment
from torchmedic.repro import recorder
from torchmedic.runfolder.files import release, write_diagnosis

_CHECKS_OF_NUMBERS = frozenset({"multinomial", "bernoulli", "bce"})  # families of kernels


def explain_noticed_loss(error: BaseException, frame: FrameType, agent: ProcessContext) -> None:
    """A device was found dead before the user's own code came to notice it."""
    fault = device_fault_of(error)
    if fault is not None and fault.sticky:
        release(agent.open().path)
        explain_loss(error, fault, agent, frame)


def explain_loss(
    error: BaseException, fault: DeviceFault, agent: ProcessContext, frame: FrameType | None = None
) -> None:
    """Explain a dead device once; what comes later is its echo."""
    batches = agent.batches.recent()
    incident = raised(error, agent)
    folder = agent.open()
    folder.events.write("exception", symptom=incident.symptom, step=incident.step, phase=incident.phase)
    if agent.device_lost:
        return
    agent.device_lost = True
    with LostDevice(incident, fault, batches, frame) as lost:
        lost.replay()
        diagnosis, evidence = _diagnosed(lost)
        if diagnosis.grade != "proven" and not agent.finite.on and _nan_fails(lost):
            folder.events.write("echo", code=diagnosis.code, step=incident.step)
            return  # the weights are NaN since a step that has been explained
        number = write_diagnosis(folder.path, diagnosis)
        recording = recorder.of_exception(evidence, diagnosis, agent) if evidence is not None else None
        if recording is not None:
            recording.write(folder.path, number)


def _nan_fails(lost: LostDevice) -> bool:
    """Whether the check of the kernel is one that NaN does not pass."""
    return any(said.family in _CHECKS_OF_NUMBERS for said in lost.words)


def _diagnosed(lost: LostDevice) -> tuple[Diagnosis, ShadowEvidence | None]:
    """The diagnosis, and the exception of the shadow that it rests on, if there is one."""
    shown = lost.raised
    if shown is not None:
        found = _shown(shown)
        confirmed = confirm(lost)
        if found is not None and not confirmed.contradicts:
            return _amended(found, shown, confirmed), shown
    diagnosis = ask(lost, registry.LOST)
    if diagnosis is None:
        evidence = RaisedEvidence(lost.incident)
        evidence.autopsy = examine_memory(evidence)
        diagnosis = diagnose(evidence, registry.RAISED)
    return diagnosis, None


def _shown(evidence: ShadowEvidence) -> Diagnosis | None:
    """The diagnosis of the exception that the shadow raised."""
    found = ask(evidence, registry.SHADOWED)
    if (found is None or found.grade != "proven") and complains_of_number(evidence):
        echo = EchoEvidence.of_exception(evidence)
        echo.replay()
        older = ask(echo, registry.NUMBERS) if echo.births else None
        if older is not None and older.grade != "possible":
            return older
    return found


def _amended(found: Diagnosis, evidence: ShadowEvidence, confirmed: Confirmation) -> Diagnosis:
    """A finding of the shadow, with the line at which the device reported it and a grade no better than that."""
    lost = evidence.lost
    surfaced = lost.surfaced
    known = {(place.file, place.line) for place in found.locations}
    more = () if surfaced is None or (surfaced.file, surfaced.line) in known else (surfaced,)
    grade: Grade = found.grade
    if grade == "proven" and not confirmed.certain:
        grade = "likely"
    return msgspec.structs.replace(
        found,
        grade=grade,
        locations=(*found.locations, *more),
        evidence=(*confirmed.facts, lost.how_it_was_run, *_caveat(lost), *found.evidence),
        treatments=tuple(_on_stand_ins(each, lost) for each in found.treatments),
    )


def _caveat(lost: LostDevice) -> tuple[str, ...]:
    if lost.failed is None or not lost.failed.index_invented:
        return ()
    return ("the values shown were made anew on the CPU; those that the device had are lost with it",)


def _on_stand_ins(treatment: Treatment, lost: LostDevice) -> Treatment:
    """A treatment without its loss, which was computed with stand-in weights and means nothing."""
    if not treatment.proven or not lost.shadow.parameters:
        return treatment
    return msgspec.structs.replace(treatment, result="on the CPU with stand-in weights: runs through, all finite")
