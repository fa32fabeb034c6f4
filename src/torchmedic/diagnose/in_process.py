"""Diagnose an exception inside the process that raised it, and leave the result in the run folder."""

from __future__ import annotations

from typing import Any

from torchmedic.detect.exceptions import raised
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose as ask
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.rundir import write_diagnosis


def diagnose(error: BaseException, agent: Any) -> None:
    """Called by the agent while the frames of `error` are alive."""
    incident = raised(error, agent)
    diagnosis = ask(RaisedEvidence(incident), registry.RAISED)
    agent.events.write("exception", symptom=incident.symptom, step=incident.step, phase=incident.phase)
    write_diagnosis(agent.folder, diagnosis)
