"""Explain a device that died under a step: what its shadow ran into, what the kernel said, how far the device was."""

from __future__ import annotations

import msgspec

from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask, diagnose
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.evidence.lost_device.kernel_match import Confirmation, confirm
from torchmedic.evidence.lost_device.shadow_evidence import ShadowEvidence
from torchmedic.evidence.memory.autopsy import examine_memory
from torchmedic.evidence.number_exception import EchoEvidence, complains_of_number
from torchmedic.records import Diagnosis, Grade, Treatment


def explain(lost: LostDevice) -> tuple[Diagnosis, ShadowEvidence | None]:
    """The diagnosis, and the exception of the shadow that it rests on, if it does."""
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
    """What the rules make of the exception that the shadow raised."""
    found = ask(evidence, registry.SHADOWED)
    if (found is None or found.grade != "proven") and complains_of_number(evidence):
        echo = EchoEvidence.of_exception(evidence)
        echo.replay()
        older = ask(echo, registry.NUMBERS) if echo.births else None
        if older is not None and older.grade != "possible":
            return older
    return found


def _amended(found: Diagnosis, evidence: ShadowEvidence, confirmed: Confirmation) -> Diagnosis:
    """The same finding, told as what it is: seen in a shadow, of a device that reported it elsewhere."""
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
    """A loss that was computed with invented weights is no figure to show."""
    if not treatment.proven or not lost.shadow.parameters:
        return treatment
    return msgspec.structs.replace(treatment, result="on the CPU with stand-in weights: runs through, all finite")
