"""A number that is NaN or infinite: the origin of it, found by a replay of the step that made it."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

from torchmedic.detect.failures.nonfinite import nonfinite_incident
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import diagnose
from torchmedic.evidence.number_exception import EchoEvidence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.spoiled_weights import trace_back
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.stages import Finding, Quantity, UpdateStage
from torchmedic.observe.step.batches import tensors_in_frames
from torchmedic.records import Diagnosis
from torchmedic.repro import recorder

if TYPE_CHECKING:
    from torch.optim import Optimizer


def explain_nonfinite(
    optimizer: Optimizer | None, frame: FrameType, quantity: Quantity, stage: UpdateStage, agent: ProcessContext
) -> Finding:
    """Find the origin of a bad number, while the frames of its step are on the stack."""
    agent.batches.settle(tensors_in_frames(frame))
    incident = nonfinite_incident(optimizer, quantity, stage, agent)
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    evidence.replay()
    evidence = trace_back(evidence, frame)
    try:
        diagnosis = diagnose(evidence, registry.NUMBERS)
        return Finding(diagnosis, recorder.of_numbers(evidence, diagnosis, agent))
    finally:
        evidence.restore_weights()


def older_origin(evidence: EchoEvidence) -> Diagnosis | None:
    """The origin of the number that an exception or an exit complains of; None where it is not at least likely."""
    evidence.replay()
    diagnosis = diagnose(evidence, registry.NUMBERS) if evidence.births else None
    return diagnosis if diagnosis is not None and diagnosis.grade != "possible" else None
