"""Weights that a step before has spoiled: which call of backward did it, found by replaying those that were kept."""

from __future__ import annotations

import math
from types import FrameType
from typing import TYPE_CHECKING

from torchmedic.detect.failures.nonfinite import NonFinite
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.weight_copies import Original

if TYPE_CHECKING:
    from torchmedic.evidence.numbers import NumbersEvidence

_TRIED = 8


def go_back(evidence: NumbersEvidence, frame: FrameType | None) -> None:
    """Examine an earlier call of backward, if it and not the step under way is the one that matters."""
    if _are_spoiled(evidence):
        _find_culprit(evidence, frame)
        return
    bad = evidence.agent.finite.bad_call
    calls = list(evidence.agent.kept_backwards.calls)
    if bad is not None and bad in calls[:-1] and not evidence.births:
        # One of several batches of an accumulation, and not the last.
        state = _State(evidence)
        step = evidence.turn_to(bad, frame)
        if step is not None:
            evidence.replay(step)
        if not evidence.births:
            state.put_back()


def _are_spoiled(evidence: NumbersEvidence) -> bool:
    """Whether the weights were finite when training began and are not any more."""
    if not any(map(math.isfinite, evidence.incident.losses)):
        return False
    watch = evidence.agent.finite
    if watch.bad_call is not None and any(id(tensor) not in watch.born_bad for tensor in evidence.incident.damaged):
        return True
    leaves = [birth.leaf for birth in evidence.births if birth.leaf is not None]
    if not leaves or evidence.name_of(leaves[0])[0] != "parameter":
        return False
    return id(leaves[0].tensor) not in watch.born_bad


def _find_culprit(evidence: NumbersEvidence, frame: FrameType | None) -> None:
    """Weights of before are more like the truth than stand-ins, and the step before than the one under way."""
    state = _State(evidence)
    noticed = evidence.incident
    calls: list[KeptBackward | None] = [
        *suspects(list(evidence.agent.kept_backwards.calls), evidence.agent.finite.bad_call),
        None,
    ]
    originals = evidence.agent.rewind.originals()
    choices: list[list[Original]] = [originals, []] if originals else [[]]
    for weights in choices:
        for call in calls:
            step = evidence.turn_to(call, frame) if call is not None else evidence.step
            if step is None:
                continue
            evidence.exchange_weights(step, weights)
            evidence.replay(step) if call is not None else evidence.look(step)
            if _is_reproduced(evidence, call):
                evidence.why_not = ""
                evidence.history = history(evidence, noticed, call)
                return
            evidence.restore()
            state.turn_back()
    state.put_back()
    evidence.is_unexplained = True


class _State:
    """What the evidence was on, to go on with it."""

    def __init__(self, evidence: NumbersEvidence) -> None:
        self._evidence = evidence
        self._subject = (evidence.incident, evidence.agent, evidence.step)
        self._found = (evidence.scope, evidence.played, evidence.targets, evidence.faithful, evidence.why_not)

    def turn_back(self) -> None:
        evidence = self._evidence
        evidence.incident, evidence.agent, evidence.step = self._subject

    def put_back(self) -> None:
        self.turn_back()
        evidence = self._evidence
        evidence.scope, evidence.played, evidence.targets, evidence.faithful, evidence.why_not = self._found
        evidence.forget_findings()


def _is_reproduced(evidence: NumbersEvidence, call: KeptBackward | None) -> bool:
    """Whether the step, with other weights, makes a bad value of its own."""
    first = evidence.births[0] if evidence.births else None
    if first is None or (first.leaf is not None and evidence.name_of(first.leaf)[0] in ("parameter", "buffer")):
        return False
    if call is None or call.loss is None or not math.isfinite(call.loss):
        return first.op is not None
    return evidence.found[0] == "gradient"


def suspects(calls: list[KeptBackward], bad: KeptBackward | None) -> list[KeptBackward]:
    """The calls that may have made the bad gradient, the likeliest first; the one with the bad loss comes last.

    Args:
        calls: In order, as many as were kept.
        bad: The first whose loss was not finite.
    """
    if bad is None or bad not in calls:
        return []
    at = calls.index(bad)
    before = calls[:at]
    updates = sorted({call.update for call in before}, reverse=True)
    found: list[KeptBackward] = []
    for update in updates:
        together = [call for call in before if call.update == update]
        # Those of one closure follow each other; those of an accumulation count as one, and its first is the cause.
        found += reversed(together) if update == bad.update else together
    under_way = at == len(calls) - 1
    return found[:_TRIED] if under_way else [*found[:_TRIED], bad]


def history(evidence: NumbersEvidence, noticed: NonFinite, call: KeptBackward | None) -> str:
    """Which step was replayed, with what."""
    step = evidence.incident.step
    spoiled = f"the weights were spoiled when this was noticed, in step {noticed.step}"
    batch = "with its own batch and " if call is not None else "with "
    if call is not None and call.batch is None:
        batch = "with its own data and "
    lost = len(evidence.stand_ins) if evidence.stand_ins is not None else 0
    if evidence.rewound is not None:
        weights = _weights(evidence.rewound.steps, step)
        weights += f", stand-ins for {lost} that were not finite by then" if lost else ""
    else:
        weights = f"stand-ins for the {lost} weights that were not finite any more"
    return f"{spoiled}; step {step} was replayed {batch}{weights}, and failed by itself"


def _weights(steps: set[int], step: int) -> str:
    if steps == {step}:
        return "the very weights that it had"
    copied = min(steps)
    apart = abs(step - copied)
    words = {1: "one step", 2: "two steps", 3: "three steps"}.get(apart, f"{apart} steps")
    return f"the weights of step {copied}, {words} {'before' if copied < step else 'later'}"
