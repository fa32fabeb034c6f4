"""Gradients that are computed and cleared again and again, for an optimizer that never steps."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from torch.optim import lr_scheduler

from torchmedic.detect.loop.incident import LoopIncident, OptimizerNeverSteps
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import (
    FUNCTIONS,
    LOOPS,
    callee,
    calls_backward,
    calls_in,
    has_line,
    innermost,
    last_name,
    nodes_in,
    own_nodes,
    syntax_tree,
)
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import user_trees

_MIN_BACKWARDS = 16  # whose gradients were cleared
_MIN_TURNS = 6  # whose gradients were cleared, where the source shows that the optimizer never steps
_MIN_CLEARS = 2  # of the gradients of many calls of backward, which were added up
_MIN_PASSES = 3  # over the data, without an update
_NUMBERS = ("item", "float", "norm", "clip_grad_norm_", "get_total_norm")
_MIN_ACCUMULATED = 48  # calls of backward whose gradients were added up and cleared


def find(habits: Habits) -> Iterator[LoopIncident]:
    """An optimizer never steps, and nobody else updates its weights."""
    living = [watched for watched in habits.optimizers.values() if watched.optimizer is not None]
    has_steps = any(event.kind in ("step", "step skipped", "scaler step") for event in habits.events)
    if len(living) == 1 and not has_steps and not habits.steps and not habits.reach.reached_data:
        yield from _never(habits, living[0], has_steps=False)
    elif len(living) > 1 and has_steps:
        for watched in living:
            if _is_never_named(habits.events, watched.number):
                yield from _never(habits, watched, has_steps=True)


def _never(habits: Habits, watched: Watched, *, has_steps: bool) -> Iterator[LoopIncident]:
    events = habits.events
    backwards = [event for event in events if event.kind == "backward"]
    clears = [
        place
        for place, (before, after) in enumerate(itertools.pairwise(events))
        if _clears(before, after, watched.number) and (not has_steps or before.who == watched.number)
    ]
    cleared = len(clears)
    lost = sum(event.kind == "backward" for event in events[: clears[-1]]) if clears else 0
    passes = sum(event.kind == "fetch" and event.fact.position == 1 for event in events)
    is_late = not has_steps and len(backwards) >= _MIN_ACCUMULATED and passes >= _MIN_PASSES
    is_habit = cleared >= (_MIN_TURNS if has_steps else _MIN_BACKWARDS) or (
        cleared >= _MIN_CLEARS and lost >= _MIN_ACCUMULATED and not has_steps
    )
    if not (is_habit or is_late) or len(backwards) < _MIN_BACKWARDS:
        return
    writes = {state.weight_writes for event in events if (state := event.states.get(watched.number)) is not None}
    if len(writes) != 1:
        return  # the weights are updated by hand
    if not has_steps and _are_collected(backwards[-1].place):
        return
    other = _step_in_its_place(events, watched.number)
    backward = backwards[-1].place
    if not has_steps and _comes_later(backward):
        return
    skipped = None if has_steps else _step_in_branch(backward)
    named = None if has_steps else _named_step(dict.fromkeys(event.place.file for event in events if event.place.line))
    yield OptimizerNeverSteps(
        step=habits.steps,
        cause=named or skipped or other or (watched.built if has_steps and watched.built is not None else backward),
        optimizer=watched.number,
        backward=backward,
        backwards=len(backwards),
        cleared=cleared,
        is_named=named is not None,
        is_skipped=named is None and skipped is not None,
        steps_other=other is not None,
    )


def _is_never_named(events: list[Event], number: int) -> bool:
    """Whether the optimizer is named where its gradients are cleared, and steps by that name in no file of the user's.

    It may be the turn of another optimizer for long: only the source tells that this one never gets its turn.
    """
    if any(event.who == number for event in events if event.kind in ("step", "step skipped", "scaler step")):
        return False
    places = {event.place for event in events if event.kind == "zero" and event.who == number and event.place.line}
    names = {
        ast.unparse(node.func.value)
        for place in places
        for node in nodes_in(syntax_tree(place.file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "zero_grad" and has_line(node, place.line)
    }
    if len(names) != 1 or not all(is_user_file(place.file) for place in places):
        return False
    name = names.pop()
    for _, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Attribute(value=value, attr="step") if ast.unparse(value) == name:
                    return False
                case ast.Call(args=args) if any(ast.unparse(given) == name for given in args) and (
                    not hasattr(lr_scheduler, callee(node))
                ):
                    return False  # somebody else may step it
    return True


def _step_in_its_place(events: list[Event], number: int) -> Place | None:
    """The line that steps another optimizer where the gradients of this one were cleared last."""
    cleared = 0
    found: dict[bool, set[Place]] = {True: set(), False: set()}
    for event in events:
        if event.kind == "zero":
            cleared = event.who
        elif event.kind == "step":
            found[cleared == number].add(event.place)
    only = found[True] - found[False]
    return only.pop() if len(only) == 1 else _second_step(events)


def _second_step(events: list[Event]) -> Place | None:
    """The line that steps an optimizer a second time after each backward: a copy of the line before it."""
    acts = [event for event in events if event.kind in ("backward", "step")]
    seconds = [
        later.place
        for first, later in itertools.pairwise(acts)
        if first.kind == later.kind == "step" and first.who == later.who and first.place != later.place
    ]
    turns = sum(first.kind == "backward" and later.kind == "step" for first, later in itertools.pairwise(acts))
    return seconds[0] if len(set(seconds)) == 1 and len(seconds) >= turns - 1 else None


def _are_collected(backward: Place) -> bool:
    """Whether the loop that calls backward keeps the gradients themselves, as for a kernel or a statistic of them."""
    tree = syntax_tree(backward.file)
    loop = innermost(tree, backward.line, LOOPS)
    for node in nodes_in(loop) if loop is not None else ():
        kept = [node.value] if isinstance(node, ast.Assign | ast.AugAssign) else []
        kept += node.args if isinstance(node, ast.Call) and callee(node) in ("append", "add_") else []
        numbers = {part for one in kept for call in calls_in(one, *_NUMBERS) for part in ast.walk(call)}
        if any(
            isinstance(part, ast.Attribute) and part.attr == "grad" and part not in numbers
            for one in kept
            for part in ast.walk(one)
        ):
            return True
    return False


def _clears(before: Event, after: Event, number: int) -> bool:
    """Whether a call of `zero_grad` has cleared a gradient of the optimizer."""
    if (before.kind, after.kind) != ("zero", "zero done") or before.who != after.who:
        return False
    state, then = before.states.get(number), after.states.get(number)
    return state is not None and then is not None and state[:2] != then[:2] and max(state.gradient) > 0


def _step_in_branch(backward: Place) -> Place | None:
    """The only call of `step` behind a condition in the function that calls backward: the branch is never taken."""
    tree = syntax_tree(backward.file)
    around = innermost(tree, backward.line, FUNCTIONS) or tree
    branches = [node for node in own_nodes(around) if isinstance(node, ast.If)] if around is not None else []
    calls = {call for branch in branches for call in calls_in(branch, "step") if call.lineno > backward.line}
    calls = {call for call in calls if not call.args or "scaler" in ast.unparse(call.func)}
    lines = {branch.lineno for branch in branches for call in calls if has_line(branch, call.lineno)}
    return Place(backward.file, max(lines)) if lines and len(calls) == 1 else None


def _comes_later(backward: Place) -> bool:
    """Whether a call of `step` outside of the loop that calls backward may still follow, as after an accumulation."""
    tree = syntax_tree(backward.file)
    function = innermost(tree, backward.line, FUNCTIONS)
    own = innermost(tree, backward.line, LOOPS)
    own = function if own is None or (function is not None and function.lineno > own.lineno) else own
    for file, each in user_trees():
        schedules = {
            last_name(node.targets[0])
            for node in nodes_in(each)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            if hasattr(lr_scheduler, callee(node.value))
        }
        for call in calls_in(each, "step"):
            if not isinstance(call.func, ast.Attribute) or last_name(call.func.value) in schedules:
                continue
            is_here = file == backward.file
            if is_here and own is not None and has_line(own, call.lineno):
                continue  # it has had its chance
            around = innermost(each, call.lineno, FUNCTIONS)
            if around is None or around is function:
                loop = innermost(each, call.lineno, LOOPS)
                if loop is not None and (calls_backward(loop) or not is_here):
                    return True
            elif any(
                getattr(around, "name", "") == callee(other) for _, one in user_trees() for other in calls_in(one)
            ):
                return True
    return False


def _named_step(files: dict[str, None]) -> Place | None:
    """A statement `optimizer.step`, which names the method and does not call it."""
    for file in filter(is_user_file, files):
        for node in nodes_in(syntax_tree(file)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute) and node.value.attr == "step":
                return Place(file, node.lineno)
    return None
