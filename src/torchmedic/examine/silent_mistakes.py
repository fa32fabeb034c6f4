"""Mistakes that raise nothing, in the loop or in the first steps: reported while the run goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import FrameType

from torchmedic.detect.loop.incident import LoopIncident, ResultThrownAway
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask, ask_each
from torchmedic.evidence.check_up import CheckUp
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.examine.publication import Said, publish_silent
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import Diagnosis
from torchmedic.source.lookup.later_phases import compares_counter, is_conditional

_NO_UPDATE = frozenset({"TM604", "TM608", "TM609", "TM624", "TM630"})  # explain why an optimizer has no gradient at all

_OF_THROWN_WEIGHTS = frozenset({"TM636"})  # follow from training that runs away, which is told in its own way:
_RUNNING_AWAY = frozenset({"TM222", "TM230", "TM234", "TM236", "TM237", "TM601"})
_ALL_ZERO = frozenset({"TM635"})  # a layer that gives 0 because its weights are 0 is told with the weights
_OF_ONE_LOOK = frozenset({"TM645"})  # the line that is blamed was looked at in one step


def explain_loop(incidents: Sequence[LoopIncident], agent: ProcessContext, said: Said) -> None:
    """Explain a mistake of the loop."""
    for incident in incidents:
        diagnosis = ask(LoopEvidence(incident, agent), registry.SILENT)
        is_told = isinstance(incident, ResultThrownAway) and diagnosis is not None and said.has_line(diagnosis)
        if diagnosis is not None and not is_told:  # by what comes of it
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
        first_call=memory.first_call,
    )
    found = list(unreached.held if unreached is not None and unreached.held else ask_each(evidence, registry.CHECKUP))
    if frame is not None and found and compares_counter():
        if unreached is not None:
            unreached.held = found
            return  # their turn may come in a later phase of the training
        found = [each for each in found if each.code not in _OF_ONE_LOOK or not _is_passing(each)]
    for diagnosis in found:
        if diagnosis.code in _OF_THROWN_WEIGHTS and (memory.is_away or said.has_code(_RUNNING_AWAY | _ALL_ZERO)):
            continue
        if unreached is not None and (said.has_line(diagnosis) or (unreached.has_whole and said.has_code(_NO_UPDATE))):
            continue  # a cut is told once: as a lost term, or as lost parameters
        publish_silent(diagnosis, agent, said)


def _is_passing(diagnosis: Diagnosis) -> bool:
    """Whether the line that is blamed may have run in the first steps only."""
    cause = diagnosis.cause_location
    return cause is not None and is_conditional(os.path.abspath(cause.file), cause.line)
