"""Mistakes that raise nothing, in the loop or in the first steps: reported while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

from torchmedic.detect.loop.incident import LoopIncident
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask, ask_each
from torchmedic.evidence.check_up import CheckUp
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.examine.publication import Said, publish_silent
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.step.tensors import parameters_of

_NO_UPDATE = frozenset({"TM604", "TM608", "TM609", "TM624", "TM630"})  # explain why an optimizer has no gradient at all

_OF_THROWN_WEIGHTS = frozenset({"TM636"})  # follow from training that runs away, which is told in its own way:
_RUNNING_AWAY = frozenset({"TM222", "TM230", "TM234", "TM236", "TM237", "TM601"})


def explain_loop(incidents: Sequence[LoopIncident], agent: ProcessContext, said: Said) -> None:
    """Explain a mistake of the loop."""
    for incident in incidents:
        diagnosis = ask(LoopEvidence(incident, agent), registry.SILENT)
        if diagnosis is not None:
            publish_silent(diagnosis, agent, said)


def explain_first_steps(
    graphs: Sequence[LossGraph], unreached: Unreached | None, frame: FrameType | None, agent: ProcessContext, said: Said
) -> None:
    """Explain what the graphs of the first steps show, or the parameters that got no gradient."""
    optimized = parameters_of(*agent.clock.optimizers)
    memory = agent.finite.memory
    past = memory.oldest_copy()
    drawn = {event.fact.drawn for event in agent.habits.events if event.kind == "fetch"}
    evidence = CheckUp(
        graphs,
        frame,
        optimized=optimized,
        unreached=unreached,
        rank=agent.rank,
        past=past,
        drawn=drawn,
        constructions=agent.clock.constructions,
    )
    for diagnosis in ask_each(evidence, registry.CHECKUP):
        if diagnosis.code in _OF_THROWN_WEIGHTS and (memory.is_away or said.has_code(_RUNNING_AWAY)):
            continue
        if unreached is not None and (said.has_line(diagnosis) or (unreached.has_whole and said.has_code(_NO_UPDATE))):
            continue  # a cut is told once: as a lost term, or as lost parameters
        publish_silent(diagnosis, agent, said)
