"""Which earlier call of backward has spoiled the weights, found by replaying the calls that were kept."""

from __future__ import annotations

import math
import time
from types import FrameType

from torchmedic.detect.failures.nonfinite import NonFinite, of_call
from torchmedic.evidence.numbers import OF_UPDATE, NumbersEvidence
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.weight_copies import Original
from torchmedic.replay.step.earlier_step import earlier_step
from torchmedic.source.segment.cut import CannotCut

_MAX_SUSPECTS = 8  # calls of backward that are replayed


def trace_back(evidence: NumbersEvidence, frame: FrameType | None) -> NumbersEvidence:
    """Look for the call of backward that made the bad number, if that is not the step under way.

    Args:
        evidence: Evidence on the step under way, replayed.
        frame: The frame in which that step runs.

    Returns:
        Evidence on the earlier call, replayed; `evidence` itself if no earlier call shows the origin. The weights may
        be exchanged for other ones until `restore_weights` is called.
    """
    if evidence.incident.quantity in OF_UPDATE:  # the optimizer made the number: no replay of the step shows it
        return evidence
    if _are_spoiled(evidence):
        found = _find_spoiling_step(evidence, frame)
        evidence.is_unexplained = found is None
        return found or evidence
    bad = evidence.agent.finite.losses.bad_call
    if bad is None or evidence.births or bad not in list(evidence.agent.kept_backwards.calls)[:-1]:
        return evidence
    # One of several batches of an accumulation, and not the last.
    earlier = _of_earlier_call(evidence, bad, frame)
    if earlier is None:
        return evidence
    earlier.replay()
    return earlier if earlier.births else evidence


def _are_spoiled(evidence: NumbersEvidence) -> bool:
    """Whether the weights were finite when training began and are not any more."""
    if not any(map(math.isfinite, evidence.incident.losses)):
        return False
    watch = evidence.agent.finite
    if watch.losses.bad_call is not None and any(
        id(tensor) not in watch.born_bad for tensor in evidence.incident.damaged
    ):
        return True
    leaves = [birth.leaf for birth in evidence.births if birth.leaf is not None]
    if not leaves or evidence.name_of(leaves[0])[0] != "parameter":
        return False
    return id(leaves[0].tensor) not in watch.born_bad


def _find_spoiling_step(evidence: NumbersEvidence, frame: FrameType | None) -> NumbersEvidence | None:
    """The step that makes a bad value of its own, replayed with other weights; None if no step does.

    Rewound weights are tried before stand-ins, and earlier steps before the one under way.
    """
    calls: list[KeptBackward | None] = [
        *suspects(list(evidence.agent.kept_backwards.calls), evidence.agent.finite.losses.bad_call),
        None,
    ]
    originals = evidence.agent.rewind.originals()
    choices: list[list[Original]] = [originals, []] if originals else [[]]
    for weights in choices:
        for call in calls:
            candidate = _of_earlier_call(evidence, call, frame) if call is not None else _of_same_step(evidence)
            if candidate is not None and candidate.step is not None and _replays_with(candidate, weights, call):
                candidate.history = history(candidate, evidence.incident, call)
                return candidate
    return None


def _of_earlier_call(evidence: NumbersEvidence, call: KeptBackward, frame: FrameType | None) -> NumbersEvidence | None:
    """Evidence on an earlier call of backward; None if its step cannot be replayed, or no time is left."""
    if time.monotonic() > evidence.deadline:
        return None
    try:
        step, agent = earlier_step(call, frame, evidence.agent)
    except CannotCut:
        return None
    incident = of_call(evidence.incident, call)
    return NumbersEvidence(incident, agent, evidence.frames, evidence.noticed, step, deadline=evidence.deadline)


def _of_same_step(evidence: NumbersEvidence) -> NumbersEvidence:
    """Evidence on the same step before any replay, to replay the step with other weights."""
    known = (evidence.incident, evidence.agent, evidence.frames, evidence.noticed, evidence.step)
    return NumbersEvidence(*known, deadline=evidence.deadline)


def _replays_with(candidate: NumbersEvidence, weights: list[Original], call: KeptBackward | None) -> bool:
    """Replay a step with other weights. They are put back unless the step makes a bad value of its own with them."""
    reproduced = False
    try:
        candidate.exchange_weights(weights)
        if call is not None:
            candidate.replay()
        else:
            candidate.replay_once()  # the way that repeats this step best is known
        reproduced = _is_reproduced(candidate, call)
    finally:
        if not reproduced:
            candidate.restore_weights()
    return reproduced


def _is_reproduced(evidence: NumbersEvidence, call: KeptBackward | None) -> bool:
    """Whether the step, with other weights, makes a bad value of its own."""
    first = evidence.births[0] if evidence.births else None
    if first is None or (first.leaf is not None and evidence.name_of(first.leaf)[0] in ("parameter", "buffer")):
        return False
    if call is None or call.loss is None or not math.isfinite(call.loss):
        return first.op is not None
    return evidence.victim == "gradient"


def suspects(calls: list[KeptBackward], bad: KeptBackward | None) -> list[KeptBackward]:
    """The calls that may have made the bad gradient, the likeliest first; the one with the bad loss comes last."""
    if bad is None or bad not in calls:
        return []
    at = calls.index(bad)
    before = calls[:at]
    updates = sorted({call.update for call in before}, reverse=True)
    found: list[KeptBackward] = []
    for update in updates:
        together = [call for call in before if call.update == update]
        # Calls of one closure follow each other. Calls of an accumulation count as one, and its first is the cause.
        found += reversed(together) if update == bad.update else together
    under_way = at == len(calls) - 1
    return found[:_MAX_SUSPECTS] if under_way else [*found[:_MAX_SUSPECTS], bad]


def history(evidence: NumbersEvidence, noticed: NonFinite, call: KeptBackward | None) -> str:
    """Which step was replayed, with which batch and weights, as a sentence."""
    step = evidence.incident.step
    spoiled = f"the weights were spoiled when this was noticed, in step {noticed.step}"
    batch = "with its own batch and " if call is not None else "with "
    if call is not None and call.batch is None:
        batch = "with its own data and "
    exchanged = evidence.weights
    lost = exchanged.invented if exchanged is not None else 0
    if exchanged is not None and exchanged.steps:
        weights = _weights(exchanged.steps, step)
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
