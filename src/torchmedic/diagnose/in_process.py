"""Diagnose a failing step inside its own process, and leave the result in the run folder."""

from __future__ import annotations

from types import FrameType
from typing import Any

from torchmedic.detect.echoes import is_echo
from torchmedic.detect.exceptions import raised
from torchmedic.detect.nonfinite import turned_bad
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose
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


def nonfinite(optimizer: Any, frame: FrameType, what: str, agent: Any) -> None:
    """Called by the agent when NaN or infinity is about to reach the weights; the step's frames are on the stack."""
    incident = turned_bad(optimizer, what, agent)
    evidence = NumbersEvidence(incident, frame, agent)
    diagnosis = diagnose(evidence, registry.NUMBERS)
    agent.events.write("nonfinite", symptom="nan", step=incident.step, what=what)
    write_diagnosis(agent.folder, diagnosis)
