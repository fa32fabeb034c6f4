"""A number that is NaN or infinite: its origin, found by a replay; also where the script exits because of it."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from torchmedic.contained import report_fault
from torchmedic.detect.failures.nonfinite import NonFinite, nonfinite_incident
from torchmedic.diagnose import registry
from torchmedic.diagnose.engine import ask, diagnose
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.last_steps import divergences, present_step_again
from torchmedic.evidence.number_exception import EchoEvidence, asks_about_number
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.spoiled_weights import trace_back
from torchmedic.examine.held_step import hold
from torchmedic.examine.publication import publish_finding
from torchmedic.observe.context import ProcessContext, StepContext
from torchmedic.observe.numbers.loss_trend import ABSURD
from torchmedic.observe.stages import Finding, Quantity, UpdateStage
from torchmedic.observe.step.tensors import tensors_in_frames
from torchmedic.records import Diagnosis
from torchmedic.records.numbers import Badness, NumberTrace, PathNode
from torchmedic.replay.isolation.python_state import is_shared_with_other_threads
from torchmedic.replay.step.trial import source_of
from torchmedic.replay.trace.bad_value_origins import Birth
from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.replay.trajectory.course import MAX_SECONDS
from torchmedic.repro import recorder
from torchmedic.source.live_frames import Frame
from torchmedic.source.user_code import relative, user_frame

if TYPE_CHECKING:
    from torch.optim import Optimizer


_MAX_NODES = 12
_MAX_WINDOWS = 3  # of steps that are run again until one shows why a loss has grown
_GROWN = 3.0  # times the first loss
_SECONDS_OF_EARLY_QUESTION = 5.0  # per copy: the loss may well come back, and the run waits
_MAX_CODE = 80  # characters
_MAX_INPUTS = 4
# Operations that hand values on as they are; a reader needs to see none of them.
_PLAIN = frozenset(
    "view reshape transpose t permute expand unsqueeze squeeze detach clone alias copy to_copy slice select as_strided "
    "unsafe_view contiguous".split()
)


def explain_nonfinite(
    optimizer: Optimizer | None, frame: FrameType, quantity: Quantity, stage: UpdateStage, agent: ProcessContext
) -> Finding | None:
    """Find the origin of a bad number, while the frames of its step are on the stack."""
    agent.batches.settle(tensors_in_frames(frame))
    incident = nonfinite_incident(optimizer, quantity, stage, agent)
    if quantity == "growth":
        return _explain_growth(incident, frame, agent)
    if quantity == "standstill":
        return _explain_standstill(incident, frame, agent)
    if quantity == "sunk":
        return _explain_sunk(incident, frame, agent)
    divergence, why = next(_divergences(frame, agent, stage))
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    evidence.replay()
    evidence = trace_back(evidence, frame)
    if divergence is not None and divergence.is_only_far and _is_outside_domain(evidence):
        divergence, why = None, "the loss did not grow"
    evidence.divergence, evidence.why_no_divergence = divergence, why
    try:
        diagnosis = _diagnose(evidence)
        diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, *_rank_note(agent)))
        kept = evidence.trial_step if evidence.weights is None else None
        return Finding(
            diagnosis,
            recorder.of_numbers(evidence, diagnosis, agent),
            _trace(evidence, diagnosis),
            functools.partial(hold, lambda: kept, diagnosis, agent) if kept is not None else None,
        )
    finally:
        evidence.restore_weights()


def _is_outside_domain(evidence: NumbersEvidence) -> bool:
    """Whether finite values gave a NaN: the operation has no value there, whatever moved the weights."""
    first = evidence.births[0] if evidence.births else None
    return first is not None and first.op is not None and first.kind == "nan"


def _trace(evidence: NumbersEvidence, diagnosis: Diagnosis) -> NumberTrace | None:
    """What the report draws beside the diagnosis; a fault in it leaves the diagnosis alone."""
    try:
        path = path_of(evidence)
    except Exception as error:
        report_fault("examine.path", error)
        path = ()
    if not path and not evidence.tried:
        return None
    return NumberTrace(code=diagnosis.code, step=diagnosis.step, path=path, tried=tuple(evidence.tried))


def _explain_growth(incident: NonFinite, frame: FrameType, agent: ProcessContext) -> Finding | None:
    """A loss that is finite and far too large: said where a rerun of the last steps proves why.

    Where they cannot be run again, it is said if the weights have grown beyond doubt.
    """
    if is_shared_with_other_threads(frame):
        return None  # the run goes on, and may be healthy
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    rules = registry.DIVERGED
    memory = agent.finite.memory
    if _was_huge_at_first(incident, agent):  # no update has made it so
        evidence.replay_once()
        diagnosis = ask(evidence, registry.DIVERGED)
        if diagnosis is not None:
            return Finding(replace(diagnosis, severity="warning"))
    within = MAX_SECONDS if memory.is_lost or memory.is_far else _SECONDS_OF_EARLY_QUESTION
    found = _divergences(frame, agent, incident.stage, beyond_doubt=True, within=within)
    for divergence, evidence.why_no_divergence in itertools.islice(found, _MAX_WINDOWS):
        if divergence is None:
            break
        evidence.divergence, rules = divergence, registry.DIVERGED_SOMEHOW
        diagnosis = ask(evidence, registry.RUNAWAY)
        if diagnosis is not None and (diagnosis.grade == "proven" or not divergence.trajectory.is_exact):
            # A batch of another scale may be meant, and training may recover from it.
            return Finding(replace(diagnosis, severity="warning"), is_tentative=divergence.has_outlier)
    if rules is registry.DIVERGED:
        evidence.replay_once()
    diagnosis = ask(evidence, rules)
    return Finding(replace(diagnosis, severity="warning")) if diagnosis is not None else None


def _was_huge_at_first(incident: NonFinite, agent: ProcessContext) -> bool:
    """Whether the loss was absurd before the first update, and has not grown since."""
    losses = [abs(loss) for loss in incident.losses]
    is_whole = 0 < agent.clock.updates <= len(losses)
    return is_whole and losses[0] > ABSURD and max(losses) < _GROWN * losses[0]


def _explain_standstill(incident: NonFinite, frame: FrameType, agent: ProcessContext) -> Finding | None:
    """A loss that is still where it was at first: said where standardised targets move the loss."""
    if is_shared_with_other_threads(frame):
        return None
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    evidence.divergence = present_step_again(frame, agent, incident.stage)
    diagnosis = ask(evidence, registry.STANDING_STILL) if evidence.divergence is not None else None
    return Finding(replace(diagnosis, severity="warning")) if diagnosis is not None else None


def _explain_sunk(incident: NonFinite, frame: FrameType, agent: ProcessContext) -> Finding | None:
    """A loss that was above zero and is below it: said where the present step shows a penalty with the wrong sign."""
    if is_shared_with_other_threads(frame):
        return None
    evidence = NumbersEvidence.at_frame(incident, frame, agent)
    evidence.replay_once()
    diagnosis = ask(evidence, registry.SUNK)
    return Finding(replace(diagnosis, severity="warning")) if diagnosis is not None else None


def _divergences(
    frame: FrameType | None,
    agent: StepContext,
    stage: UpdateStage | None,
    *,
    beyond_doubt: bool = False,
    within: float = MAX_SECONDS,
) -> Iterator[tuple[Divergence | None, str]]:
    """The last steps, ready to be run again; a fault in preparing them does not end the examination."""
    try:
        yield from divergences(frame, agent, stage, beyond_doubt=beyond_doubt, within=within)
    except Exception as error:
        report_fault("examine.divergence", error)
        yield None, "the last steps could not be run again"


def _diagnose(evidence: NumbersEvidence) -> Diagnosis:
    """What made the weights grow, else the operation that made the number: where weights grow, its line is innocent."""
    divergence = evidence.divergence
    if divergence is None:
        return diagnose(evidence, registry.NUMBERS_OF_STEP)
    is_grown = not divergence.trajectory.is_exact and not divergence.is_only_far
    return (ask(evidence, registry.RUNAWAY) if is_grown else None) or diagnose(evidence, registry.NUMBERS)


def _rank_note(agent: ProcessContext) -> tuple[str, ...]:
    """The rank of the step, in a job of several ranks: no traceback is printed here that would tell it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ()
    world = distributed.get_world_size()
    return (f"this is the step of rank {agent.rank}, one of {world} ranks",) if world > 1 else ()


def older_origin(evidence: EchoEvidence) -> Diagnosis | None:
    """The origin of the number that an exception or an exit complains of; None where it is not at least likely."""
    innermost = evidence.frames[-1].live if evidence.frames else None
    evidence.divergence, evidence.why_no_divergence = next(_divergences(innermost, evidence.agent, None))
    evidence.replay()
    is_known = evidence.births or evidence.divergence is not None
    diagnosis = _diagnose(evidence) if is_known else None
    return diagnosis if diagnosis is not None and diagnosis.grade != "possible" else None


def runaway_before(evidence: EchoEvidence) -> Diagnosis | None:
    """Why the weights ran away before a value was refused; None where a rerun of the last steps does not show that."""
    innermost = evidence.frames[-1].live if evidence.frames else None
    evidence.divergence, _ = next(_divergences(innermost, evidence.agent, None, beyond_doubt=True))
    return ask(evidence, registry.COUNTERFACTUAL) if evidence.divergence is not None else None


def explain_exit(frame: FrameType, agent: ProcessContext) -> None:
    """Find the origin of the number that made the script give up, if that is why it leaves."""
    user = user_frame(frame)
    if user is None or not agent.finite.on or not asks_about_number(Frame(user, user.f_lasti, user.f_lineno)):
        return
    diagnosis = older_origin(EchoEvidence.of_exit(frame, agent))
    if diagnosis is not None:
        agent.finite.on = False
        publish_finding(Finding(diagnosis), agent)


def path_of(evidence: NumbersEvidence) -> tuple[PathNode, ...]:
    """The operations from the birth of the first bad number to where it was noticed; empty if the birth is unknown."""
    birth, scope = evidence.birth, evidence.scope
    if birth is None or scope is None:
        return ()
    nodes = [_first(birth, evidence, scope)]
    way = [scope.ops[index] for index in reversed(birth.path)]
    shown = [op for op in way if op.kind not in _PLAIN or op is birth.spoiled]
    for op in shown:
        nodes.append(_node(op, scope, "spoiled" if op is birth.spoiled else "way"))
    kept = _shortened(nodes)
    return (*kept, PathNode(operation=evidence.victim, role="end", made=kept[-1].made))


def _first(birth: Birth, evidence: NumbersEvidence, scope: Microscope) -> PathNode:
    if birth.op is not None:
        return _node(birth.op, scope, "birth")
    assert birth.leaf is not None
    kind, name = evidence.name_of(birth.leaf)
    return PathNode(operation=f"{kind} {name}".strip(), role="leaf", made="nan" if birth.kind == "nan" else "inf")


def _node(op: Op, scope: Microscope, role: Literal["birth", "spoiled", "way"]) -> PathNode:
    spot = scope.spot_of(op)
    given = [scope.magnitude(value) for value in op.inputs[:_MAX_INPUTS] if value.magnitude >= 0]
    return PathNode(
        operation=op.kind,
        role=role,
        backward=op.is_backward,
        made=_badness([scope.magnitude(value) for value in op.outputs]),
        given=tuple(float(f"{value:.4g}") if math.isfinite(value) else None for value in given),
        file=relative(spot.file) if spot is not None else "",
        line=spot.line if spot is not None else 0,
        code=" ".join(source_of(spot).split())[:_MAX_CODE] if spot is not None else "",
    )


def _badness(magnitudes: list[float]) -> Badness:
    if any(map(math.isnan, magnitudes)):
        return "nan"
    return "inf" if any(map(math.isinf, magnitudes)) else ""


def _shortened(nodes: list[PathNode]) -> list[PathNode]:
    """The first and the last nodes; the first of the last ones says how many are left out."""
    if len(nodes) <= _MAX_NODES:
        return nodes
    half = _MAX_NODES // 2
    first, last = nodes[:half], nodes[-half:]
    return [*first, replace(last[0], skipped=len(nodes) - 2 * half), *last[1:]]
