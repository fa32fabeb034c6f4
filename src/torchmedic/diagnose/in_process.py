"""Diagnose a failing step inside its own process, and leave the result in the run folder."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torchmedic.detect.echoes import is_echo
from torchmedic.detect.exceptions import raised
from torchmedic.detect.nonfinite import turned_bad
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.numbers import NumbersEvidence
from torchmedic.rundir import write_diagnosis


def exception(error: BaseException, agent: Any) -> None:
    """Called by the agent while the frames of `error` are alive."""
    if is_echo(error, agent):
        return
    incident = raised(error, agent)
    diagnosis = diagnose(RaisedEvidence(incident), registry.RAISED)
    agent.events.write("exception", symptom=incident.symptom, step=incident.step, phase=incident.phase)
    write_diagnosis(agent.folder, diagnosis)


def nonfinite(optimizer: Any, frame: FrameType, what: str, at: str, agent: Any) -> Diagnosis:
    """Called by the agent when a number is NaN or infinite; the frames of the step are on the stack."""
    incident = turned_bad(optimizer, what, at, agent)
    return diagnose(NumbersEvidence(incident, frame, agent), registry.NUMBERS)


def publish(diagnosis: Diagnosis, agent: Any) -> None:
    """Called when the bad number is about to reach the weights, or has reached them."""
    agent.events.write("nonfinite", symptom="nan", step=diagnosis.step)
    write_diagnosis(agent.folder, diagnosis)
