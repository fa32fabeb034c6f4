"""Learning rates and their schedules, as the loop uses them."""

from __future__ import annotations

import ast
import itertools
import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    PolynomialLR,
    ReduceLROnPlateau,
    StepLR,
)

from torchmedic.detect.loop.incident import LoopIncident, ScheduleBeforeUpdate, SchedulePerBatch, ZeroLearningRate
from torchmedic.observe.loop.events import Event, epoch_of
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.live_frames import stack_of
from torchmedic.source.lookup.optimizers import advanced_at, rate_set_at
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, has_line, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of, user_trees

_MIN_STEPS_AT_ZERO = 8  # with a rate of exactly zero
_MIN_MOVES_PER_BATCH = 8  # moves, each after one update
_MIN_MOVES_IN_EPOCH = 4  # of a schedule whose length is the number of epochs
_MAX_DEAD_SHARE = 1e-4  # of the first rate, with which nothing is learned any more
_BY_NUMBERS = (ReduceLROnPlateau, CosineAnnealingWarmRestarts)  # these take a metric, or parts of an epoch
_MIN_GIVEN = 2  # moves with an argument
_MIN_MOVES_AT_ZERO = 4  # of a schedule, after which a warm-up has left zero


def find(habits: Habits) -> Iterator[LoopIncident]:
    yield from _zero_rates(habits)
    yield from _schedule_first(habits)
    yield from _schedule_per_batch(habits)
    yield from _schedule_of_numbers(habits)


def _zero_rates(habits: Habits) -> Iterator[LoopIncident]:
    """Every update multiplied its gradients by zero."""
    for number, watched in habits.optimizers.items():
        optimizer = watched.optimizer
        steps = [event for event in habits.events if event.kind == "step" and event.who == number]
        if (
            optimizer is None
            or len(steps) < _MIN_STEPS_AT_ZERO
            or not type(optimizer).__module__.startswith("torch.optim")
        ):
            continue
        if not all(rate == 0 for event in steps for rate in event.fact.rates):
            continue
        moves = [event for event in habits.events if event.kind == "schedule" and event.fact.optimizer == number]
        if "initial_lr" in optimizer.param_groups[0] and len(moves) < _MIN_MOVES_AT_ZERO:
            continue  # there is a schedule, which may have its first move yet to make
        others = [event for event in habits.events if event.kind == "step" and event.who != number]
        first = max(float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups)
        found = rate_set_at(stack_of(sys._getframe()), optimizer, "cause", "", value=0.0) if moves and first else None
        incident = ZeroLearningRate(
            step=steps[-1].step,
            cause=Place(found.file, found.line) if found is not None else watched.built or steps[-1].place,
            first=first if found is not None else 0.0,
            optimizer=number,
            update=steps[-1].place,
            updates=len(steps),
            scheduled=len(moves),
            is_alone=not others,
            is_whole=found is not None and _is_whole_ratio(found.file, found.line),
        )
        if (moves and not incident.is_whole) or rates_by_hand():
            habits.held[id(optimizer)] = incident  # a schedule or the script may give another rate later
        else:
            yield incident
    for key, incident in habits.held.items() if habits.is_ending else ():
        known = habits.standstill.watched.get(key)
        if known is not None and all(each.rate == 0 for each in known.rates):
            yield incident


def _is_whole_ratio(file: str, line: int) -> bool:
    """Whether a function returns a ratio on this line that an integer division makes 0 until it is 1."""
    given = [
        node.value for node in nodes_in(syntax_tree(file)) if isinstance(node, ast.Return) and has_line(node, line)
    ]
    given += [
        node.body for node in nodes_in(syntax_tree(file)) if isinstance(node, ast.Lambda) and has_line(node, line)
    ]
    while given:
        match given.pop():
            case ast.BinOp(op=ast.FloorDiv()):
                return True
            case ast.IfExp(body=body, orelse=other):
                given += [body, other]
            case ast.Call(args=args) as call if callee(call) in ("min", "max", "float"):
                given += args
    return False


def rates_by_hand() -> bool:
    """Whether the user's code handles the groups of an optimizer, in which it can set a rate."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "param_groups"
        for _, tree in user_trees()
        for node in nodes_in(tree)
    )


def _moves(events: list[Event]) -> dict[int, list[Event]]:
    """The moves of every schedule, by its number."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if event.kind == "schedule":
            found.setdefault(event.who, []).append(event)
    return found


def _schedule_first(habits: Habits) -> Iterator[LoopIncident]:
    """The schedule moves on before the first update: its first rate is never used."""
    if any(event.kind == "gap" for event in habits.events[:1]):
        return
    for number, moves in _moves(habits.events).items():
        whose = moves[0].fact.optimizer
        if whose not in habits.optimizers or len(moves) < 2 or any(move.fact.is_explicit for move in moves):
            continue
        if len({(move.site, move.fact.optimizer) for move in moves}) != 1:
            continue
        order = _order(habits.events, number, whose)
        repeated = any(a == b == "schedule" for a, b in itertools.pairwise(order))
        if len(order) < 4 or order[0] != "schedule" or repeated:
            continue  # several moves in a row bring a schedule to where it was when training was stopped
        updates = [event for event in habits.events if event.kind == "step" and event.who == whose]
        first, used = moves[0].fact.rates, updates[0].fact.rates if updates else ()
        if not used or None in first or None in used or first == used:
            continue
        yield ScheduleBeforeUpdate(
            step=moves[-1].step,
            cause=moves[-1].place,
            optimizer=whose,
            update=updates[-1].place,
            first=first[0],
            used=used[0],
        )


def _schedule_per_batch(habits: Habits) -> Iterator[LoopIncident]:
    """A schedule that is over, or has killed the rate, long before the first epoch is: its numbers mean epochs."""
    if habits.is_ending:
        return  # the loop over the epochs is gone, and with it their number
    fetches = [event for event in habits.events if event.kind == "fetch" and event.fact.length is not None]
    batches = fetches[0].fact.length if len({event.fact.dataset for event in fetches}) == 1 else 0
    for number, moves in _moves(habits.events).items():
        whose = moves[0].fact.optimizer
        around = [
            event for event in habits.events if (event.kind, event.who) in (("schedule", number), ("step", whose))
        ]
        in_turn = all(a.kind != b.kind for a, b in itertools.pairwise(around))
        if len(moves) < _MIN_MOVES_PER_BATCH or not in_turn or len({move.site for move in moves}) != 1:
            continue
        why = _too_short(habits.thing(number), batches, epochs_around(sys._getframe())) or _meant_in_epochs(
            habits, number, moves
        )
        if why:
            habits.standstill.rate_is_explained(habits.optimizers[whose].optimizer)
            yield SchedulePerBatch(
                step=moves[-1].step,
                cause=advanced_at(stack_of(sys._getframe()), habits.thing(number), moves[-1].place),
                optimizer=whose,
                why=why,
                schedule=type(habits.thing(number)).__name__,
            )


def _schedule_of_numbers(habits: Habits) -> Iterator[LoopIncident]:
    """A schedule is given a loss for the number of the epoch. Parts of an epoch are given, too, and never fall."""
    for number, moves in _moves(habits.events).items():
        schedule, explicit = habits.thing(number), [move for move in moves if move.fact.is_explicit]
        if schedule is None or len(explicit) < _MIN_GIVEN or isinstance(schedule, _BY_NUMBERS):
            continue
        given = [*(move.fact.epoch for move in explicit[1:]), epoch_of(schedule)]
        is_falling = any(after < before for before, after in itertools.pairwise(given))
        if any(each == int(each) for each in given if math.isfinite(each)):
            continue
        if is_falling or all(map(math.isnan, given)):
            optimizer = habits.optimizers.get(explicit[-1].fact.optimizer)
            if optimizer is not None and optimizer.optimizer is not None:
                habits.standstill.rate_is_explained(optimizer.optimizer)
            yield SchedulePerBatch(
                step=explicit[-1].step,
                cause=explicit[-1].place,
                optimizer=explicit[-1].fact.optimizer,
                schedule=type(schedule).__name__,
                why="what it was given fell from call to call" if is_falling else "it was given a tensor",
                is_of_number=True,
            )


def _too_short(schedule: Any, batches: int, epochs: Epochs | None) -> str:
    """Why a schedule cannot be meant to move with every one of these batches; empty where it may be, or 0 are known.

    A period of more epochs than there are is one of batches: the rate goes up and down on purpose.
    """
    if not batches:
        return ""
    match schedule:
        case CosineAnnealingLR(T_max=period) if epochs is not None and period > epochs.total:
            return ""
        case CosineAnnealingLR(T_max=period) if 2 * period <= batches:
            return f"its T_max of {period} is over {batches // period} times in one epoch of {batches} batches"
        case PolynomialLR(total_iters=length) if 2 * length <= batches:
            return f"its total_iters of {length} are over, and the rate is 0, in the first epoch of {batches} batches"
        case ExponentialLR(gamma=gamma) if 0 < gamma < 1 and gamma**batches < _MAX_DEAD_SHARE:
            return f"after one epoch of {batches} batches the rate is {gamma**batches:.0e} of what it was"
        case StepLR(step_size=size, gamma=gamma) if 0 < gamma < 1 and gamma ** (batches // size) < _MAX_DEAD_SHARE:
            return f"after one epoch of {batches} batches the rate is {gamma ** (batches // size):.0e} of what it was"
    return ""


def _meant_in_epochs(habits: Habits, number: int, moves: list[Event]) -> str:
    """Why the length of a schedule is a number of epochs: it is exactly that of the loop around the batches.

    The schedule must have been seen in two rounds of that loop: a loop over several trainings makes a new one in each.
    """
    match habits.thing(number):
        case CosineAnnealingLR(T_max=length):
            name = "T_max"
        case PolynomialLR(total_iters=length):
            name = "total_iters"
        case _:
            return ""
    epochs = epochs_around(sys._getframe())
    if epochs is None or epochs.total != length:
        return ""
    first = habits.epochs_of_schedules.setdefault(number, epochs.at)
    if first >= epochs.at or len(moves) < _MIN_MOVES_IN_EPOCH * (epochs.at + 1):
        return ""
    return (
        f"its {name} of {length} is the number of epochs, and it has moved {len(moves)} times by epoch {epochs.at + 1}"
    )


def _order(events: list[Event], schedule: int, optimizer: int) -> list[str]:
    """Moves of a schedule and updates, in order; a skipped update counts."""
    order: list[str] = []
    for event in events:
        if event.kind == "schedule" and event.who == schedule:
            order.append("schedule")
        elif event.kind in ("step", "step skipped") and event.who == optimizer and order[-1:] != ["step"]:
            order.append("step")
    return order


class Epochs(NamedTuple):
    """A loop `for epoch in range(total)` that is in its round number `at`, counted from 0."""

    total: int
    at: int


def epochs_around(frame: FrameType | None) -> Epochs | None:
    """The second loop from the inside, where it counts up to a number that is in sight."""
    loops = _loops(frame)
    next(loops, None)  # over the batches
    outer = next(loops, None)
    if outer is None:
        return None
    loop, holder = outer
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[limit])):
            total, at = _value(limit, holder), _variable(holder, name)
            if type(total) is int and type(at) is int and 0 <= at < total:
                return Epochs(total, at)
    return None


def _loops(frame: FrameType | None) -> Iterator[tuple[ast.For | ast.While, FrameType]]:
    """The loops of the user's running functions, innermost first."""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            found = [
                node
                for node in nodes_in(syntax_tree(code.co_filename))
                if isinstance(node, ast.For | ast.While)
                and has_line(node, frame.f_lineno)
                and node.lineno >= code.co_firstlineno
            ]
            for node in sorted(found, key=lambda node: -node.lineno):
                yield node, frame
        frame = frame.f_back


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What a number, a variable or an attribute of one is now, without running a line of the user's code."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return _variable(frame, name)
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute):
            return getattr(_variable(frame, owner), "__dict__", {}).get(attribute)
    return None


def _variable(frame: FrameType, name: str) -> Any:
    return dict(locals_of(frame)).get(name, frame.f_globals.get(name))
