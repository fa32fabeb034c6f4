"""What a loop does to gradients from one update to the next, and which of it is surely a mistake."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchmedic.detect.loop.incident import (
    ClipBeforeUnscale,
    GradientsClearedBeforeStep,
    GradientsClearedInsideAccumulation,
    GradientsNeverCleared,
    LoopIncident,
    LossNotDivided,
    StepWithoutBackward,
    UpdatesLost,
)
from torchmedic.detect.loop.intervals import Interval, intervals
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, calls_in, has_line, syntax_tree

_MIN_INTERVALS = 4  # intervals that show a habit
_MIN_UNCLEARED_INTERVALS = 6  # more of them, as nothing but their number speaks against a long accumulation
_MIN_UNCOMPUTED_INTERVALS = 8
_MIN_CYCLES = 3
_LARGE_BOUND = 100.0  # a bound that somebody has multiplied by the scale, perhaps


def find(habits: Habits) -> Iterator[LoopIncident]:
    for number, watched in habits.optimizers.items():
        known = intervals(habits.events, number)
        if len(known) < _MIN_CYCLES:
            continue
        cleared_early = list(_cleared_before_step(habits, number, known))
        yield from cleared_early or _never_computed(habits, number, known)
        yield from _clipped_to_nothing(habits, number, known)
        if watched.witness is None or cleared_early:
            continue
        yield from _never_cleared(habits, number, known)
        yield from _cleared_inside(number, known)
        yield from _stale(number, known)
        yield from _clipped_scaled(number, known)
        yield from _not_divided(habits, number, known)


def _never_cleared(habits: Habits, number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """Every backward added to what the updates before have already used."""
    last = known[-_MIN_UNCLEARED_INTERVALS:]
    if len(last) < _MIN_UNCLEARED_INTERVALS or any(
        part.touched or part.of("zero") or not part.of("backward") for part in last
    ):
        return
    gradients = {part.at_step.gradient for part in last if part.at_step is not None}
    if len(gradients) != 1 or min(next(iter(gradients))) <= 0:
        return
    # `p.grad.data.zero_()` leaves no trace but the zeros themselves.
    norms = [norm for part in last for norm in part.norms]
    read = [norm for norm in norms if norm is not None]
    if any(norm == 0 for norm in read):
        return
    if len(read) < 3:
        habits.wants_norms = not read or habits.wants_norms
        return
    step = last[-1].step
    backward = last[-1].of("backward")[-1]
    assert step is not None
    zero = _last_clearing(habits, number, last[0])
    yield GradientsNeverCleared(
        step=step.step,
        cause=step.place,
        optimizer=number,
        backward=backward.place,
        updates=sum(zero is None or part.step is None or part.step.step >= zero.step for part in known),
        norms=(read[0], read[-1]),
        in_closure=backward.fact.inside_step,
        cleared=zero.place if zero is not None else None,
        accumulates=any(len(part.of("backward")) > 1 for part in last),
    )


def _last_clearing(habits: Habits, number: int, first: Interval) -> Event | None:
    """The call that cleared the gradients of an optimizer before an interval, if no such call came later."""
    tensors = set(map(id, habits.optimizers[number].parameters))
    for event in reversed(habits.events):
        owner = habits.thing(event.who) if event.kind == "zero" else None
        is_models = isinstance(owner, torch.nn.Module) and not tensors.isdisjoint(map(id, owner.parameters()))
        if event.kind == "zero" and (event.who == number or is_models):
            is_before = first.step is not None and event.step <= first.step.step
            return event if is_before and event.place.line else None
    return None


def _cleared_inside(number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """Only the last of several micro-batches are in the gradients when the weights are updated."""
    found = _thrown_away(known[-1])
    if found is None:
        return
    lost, kept, place = found
    # The first cycle may be a short one. Steps that are left out when a loss looks bad must not be taken for cycles:
    # they differ from each other sooner or later.
    cycles = known if _thrown_away(known[0]) == found else known[1:]
    if len(cycles) < {1: 6, 2: 4}.get(lost, _MIN_CYCLES) or any(_thrown_away(part) != found for part in cycles):
        return
    last = known[-_MIN_CYCLES:]
    step = last[-1].step
    assert step is not None
    yield GradientsClearedInsideAccumulation(
        step=step.step,
        cause=place,
        optimizer=number,
        update=step.place,
        backward=last[-1].of("backward")[-1].place,
        lost=lost,
        kept=kept,
        cycles=len(cycles),
    )


def _thrown_away(part: Interval) -> tuple[int, int, Place] | None:
    """How many calls of backward were lost and kept, and where they were cleared; None where it may be meant."""
    if part.touched or part.skipped:
        return None
    lost: list[Event] = []
    kept: list[Event] = []
    places = set()
    fresh = True  # a forward pass has come before the next backward
    for act in part.acts:
        if act.kind == "forward":
            fresh = fresh or act.fact.with_gradients
        elif act.kind == "backward":
            if not fresh or act.fact.inside_step:
                return None
            kept.append(act)
            fresh = False
        elif act.kind == "step" and kept:
            return None  # the gradients were another optimizer's by-product
        elif act.kind == "zero" and kept:
            if _weights_changed(kept[-1], act, part):
                return None
            lost += kept
            kept = []
            places.add(act.place)
    if not lost or not kept or len(places) != 1:
        return None
    if {act.site for act in lost + kept} != {kept[0].site}:
        return None
    return len(lost), len(kept), places.pop()


def _weights_changed(backward: Event, clearing: Event, part: Interval) -> bool:
    """Whether somebody has used the gradients, as sharpness-aware methods do."""
    number = part.step.who if part.step is not None else 0
    before, after = backward.states.get(number), clearing.states.get(number)
    return before is None or after is None or before.weight_writes != after.weight_writes


def _cleared_before_step(habits: Habits, number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """The gradients were gone in every single update."""
    if not known[0].of("backward"):
        known = known[1:]  # the step stands before backward
    if len(known) < _MIN_INTERVALS:
        return
    for part in known:
        zeros = part.of("zero")
        if part.touched or part.step is None or not zeros or not part.cleared_last or not part.of("backward"):
            return
        last = part.of("backward")[-1]
        if last.fact.inside_step:
            return  # a closure, which steps on what it computes
        if any(act.kind == "step" for act in part.acts[part.acts.index(last) : part.acts.index(zeros[-1])]):
            return  # another optimizer has used the gradients
    if any(part.step.fact.has_gradient for part in known if part.step is not None) and not _all_zero(habits, number):
        return  # only what the witness is of was cleared
    clearing, step = known[-1].of("zero")[-1], known[-1].step
    assert step is not None
    yield GradientsClearedBeforeStep(
        step=step.step,
        cause=clearing.place,
        optimizer=number,
        update=step.place,
        backward=known[-1].of("backward")[-1].place,
        updates=len(known),
    )


def _all_zero(habits: Habits, number: int) -> bool:
    """Whether all gradients of an optimizer are zero now, right after its step. Checked only if it looks like that."""
    gradients = [tensor.grad for tensor in habits.optimizers[number].parameters if tensor.grad is not None]
    if any(gradient.is_cuda for gradient in gradients) and torch.cuda.is_current_stream_capturing():
        return False
    return all(type(gradient) is torch.Tensor and not bool(gradient.any()) for gradient in gradients)


def _stale(number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """One set of gradients was applied again and again, with no backward in between."""
    last = known[-_MIN_INTERVALS:]
    earlier = known[:-_MIN_INTERVALS]
    if any(
        part.touched or part.backwards or any(act.kind not in ("forward", "fetch") for act in part.acts)
        for part in last
    ):
        return
    states = {part.at_step[:2] for part in last if part.at_step is not None}
    if len(states) != 1 or min(next(iter(states))[0]) <= 0 or not any(part.of("backward") for part in earlier):
        return
    step = last[-1].step
    assert step is not None
    yield StepWithoutBackward(step=step.step, cause=step.place, optimizer=number, updates=len(last))


def _never_computed(habits: Habits, number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """A model is trained as it seems, and no gradient was ever computed: backward was forgotten."""
    optimizer = habits.optimizers[number].optimizer
    if len(known) < _MIN_UNCOMPUTED_INTERVALS or not type(optimizer).__module__.startswith("torch.optim"):
        return
    if any(event.kind == "backward" or (event.kind == "step" and event.fact.has_gradient) for event in habits.events):
        return
    forwards = [[act for act in part.of("forward") if act.fact.training and act.fact.with_gradients] for part in known]
    step = known[-1].step
    if not all(forwards) or step is None:
        return
    calls = calls_in(syntax_tree(step.place.file))
    is_written = any(callee(call) == "step" and has_line(call, step.place.line) for call in calls)
    yield StepWithoutBackward(
        step=step.step,
        cause=step.place if is_written else forwards[-1][-1].place,  # a library calls `step`
        optimizer=number,
        updates=len(known),
        is_first=True,
    )


def _clipped_to_nothing(habits: Habits, number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """Gradients are clipped to a norm of 0 before each update; a bound of 0 was meant to switch clipping off."""
    last = known[-_MIN_INTERVALS:]
    clips = [act for part in last for act in part.of("clip")[-1:] if act.fact is not None and act.fact <= 0]
    step = last[-1].step
    if len(clips) < _MIN_INTERVALS or step is None or not _all_zero(habits, number):
        return
    yield UpdatesLost(
        step=step.step, cause=clips[-1].place, optimizer=number, update=step.place, updates=len(clips), clipped_to=0.0
    )


def _clipped_scaled(number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """Gradients were clipped while they were still multiplied by the loss scale."""
    last = known[-2:]
    clips = []
    for part in last:
        clip = next(iter(part.of("clip")), None)
        before = part.acts[: part.acts.index(clip)] if clip is not None else []
        scales = [act.fact for act in before if act.kind == "scale"]
        if clip is None or not scales or any(act.kind == "unscale" for act in before) or part.touched:
            return
        if clip.fact is None or clip.fact >= _LARGE_BOUND or min(scales) < 16 or not part.of("scaler step"):
            return
        clips.append(clip)
    if len({clip.place for clip in clips}) == 1 and last[-1].step is not None:
        yield ClipBeforeUnscale(
            step=last[-1].step.step,
            cause=clips[-1].place,
            optimizer=number,
            update=last[-1].step.place,
            bound=clips[-1].fact,
        )


def _not_divided(habits: Habits, number: int, known: list[Interval]) -> Iterator[LoopIncident]:
    """Cycles of equally many batches of one dataset, whose mean losses are added up."""
    optimizer = habits.optimizers[number].optimizer
    if type(optimizer) is not torch.optim.SGD:
        return  # what divides by the size of the gradients does not care
    last = known[-_MIN_CYCLES:]
    calls = [part.of("backward") for part in last]
    size = len(calls[-1])
    if size < 2 or any(len(each) != size for each in calls) or len({act.site for each in calls for act in each}) != 1:
        return
    for part, each in zip(last, calls, strict=True):
        zeros, clips = part.of("zero"), part.of("clip")
        if part.touched or part.skipped or clips or part.of("step") or any(not act.fact.is_mean for act in each):
            return
        if any(part.acts.index(zero) > part.acts.index(each[0]) for zero in zeros):
            return
        fetches = [act for act in part.acts if act.kind == "fetch"]
        if len(fetches) != size or len({act.fact.dataset for act in fetches}) != 1:
            return
    step = last[-1].step
    assert step is not None
    yield LossNotDivided(
        step=step.step, cause=calls[-1][-1].place, optimizer=number, update=step.place, size=size, cycles=len(known)
    )
