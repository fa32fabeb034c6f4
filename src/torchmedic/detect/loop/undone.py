"""Updates that are undone: another line writes to the weights after each of them, or weight decay wipes them out."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from torchmedic.detect.loop.incident import LoopIncident, UpdatesUndone
from torchmedic.observe.loop.events import Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.overwrites import USUAL_DECAY
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, callee, has_line, innermost, nodes_in, own_nodes, syntax_tree
from torchmedic.source.user_variables import user_trees

_MIN_UPDATES = 12
_MIN_SHRINK = 0.05  # of a weight per update: nothing is left of an update after a few dozen others
_COLLAPSED = 0.5  # of the norm of all matrices before the first update
_MIN_SET_BACKS = 3
_END = 1 << 30
_COPIES = frozenset("load_state_dict copy_ vector_to_parameters _foreach_copy_ data".split())
_KEEPERS = _COPIES | frozenset("state_dict deepcopy parameters_to_vector clone save".split())
_WRITERS = _COPIES | frozenset(
    "reset_parameters apply normal_ uniform_ zero_ fill_ "
    "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ orthogonal_ trunc_normal_ constant_ zeros_".split()
)


def find(habits: Habits) -> Iterator[LoopIncident]:
    yield from _set_back(habits)
    for number, watched in list(habits.optimizers.items()):
        steps = [event for event in habits.events if event.kind == "step" and event.who == number]
        if watched.optimizer is None or not steps:
            continue
        update = steps[-1].place
        found = watched.overwrites.found
        if found is not None:
            writers = list(_writers(found.after, found.before, _WRITERS))
            if found.is_new and any(_writers(found.after, found.before, _KEEPERS)):
                continue  # one network for many sets of weights, each of which is kept elsewhere
            yield UpdatesUndone(
                step=habits.steps,
                cause=writers[0] if len(writers) == 1 else update,
                optimizer=number,
                update=update,
                updates=found.cycles,
                kept=found.kept,
                is_new=found.is_new,
            )
        elif len(steps) >= _MIN_UPDATES and all(event.fact.has_gradient for event in steps[-_MIN_UPDATES:]):
            yield from _decayed(habits, watched, update, len(steps))


def _set_back(habits: Habits) -> Iterator[LoopIncident]:
    """Another model of the loop, which nothing trains or changes, is copied into the trained one again and again."""
    for number, found in habits.set_backs.found.items():
        watched = habits.optimizers.get(found.optimizer)
        optimizer = watched.optimizer if watched is not None else None
        if watched is None or optimizer is None or habits.thing(number) is None or found.times < _MIN_SET_BACKS:
            continue
        steps = [event for event in habits.events if event.kind == "step" and event.who == found.optimizer]
        # Without moments of its own an optimizer begins anew, as for the next client or the next sample to adapt to.
        has_moments = any(len(state) > 1 for state in optimizer.state.values()) and watched.loaded is None
        trained = {one.data_ptr() for each in habits.optimizers.values() for one in each.parameters}
        if not steps or not has_moments or not found.memory.isdisjoint(trained) or not _is_copied_back(found.place):
            continue
        yield UpdatesUndone(
            step=habits.steps,
            cause=found.place,
            optimizer=found.optimizer,
            update=steps[-1].place,
            updates=len(steps),
            kept=0.0,
            set_back=found.times,
        )


def _is_copied_back(loading: Place) -> bool:
    """Whether a line loads `source.state_dict()`, the source is called in the same file, and the weights are lost.

    Where the state of the trained model is kept before, as that of a client in federated training, nothing is lost.
    """
    tree = syntax_tree(loading.file)
    calls = [node for node in nodes_in(tree) if isinstance(node, ast.Call)]
    for call in calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=model, attr="load_state_dict"),
                args=[ast.Call(func=ast.Attribute(value=source, attr="state_dict"))],
            ) if has_line(call, loading.line):
                back = f"{ast.unparse(source)}.load_state_dict({ast.unparse(model)}.state_dict())"
                kept = sum(ast.unparse(each) == f"{ast.unparse(model)}.state_dict()" for each in calls)
                handed_on = sum(ast.unparse(each) == back for each in calls)
                return kept == handed_on and any(ast.unparse(each.func) == ast.unparse(source) for each in calls)
    return False


def _decayed(habits: Habits, watched: Watched, update: Place, updates: int) -> Iterator[LoopIncident]:
    """Weight decay takes a considerable part of every matrix in each update, and the matrices have become small."""
    groups = [group for group in watched.optimizer.param_groups if any(one.dim() > 1 for one in group["params"])]
    shrinks = [shrink for group in groups if (shrink := _shrink(watched.optimizer, group)) is not None]
    if len(shrinks) != len(groups) or not groups or min(shrinks) < _MIN_SHRINK:
        return
    first, now = watched.overwrites.first_sizes, watched.overwrites.sizes()
    if first is not None and len(first) == 1 and type(watched.optimizer).__name__ == "SGD":
        return  # one matrix: a ridge regression, which shrinks the weights on purpose
    if first is not None and now is not None and float(now.norm()) < _COLLAPSED * float(first.norm()):
        yield UpdatesUndone(
            step=habits.steps,
            cause=watched.built or update,
            optimizer=watched.number,
            update=update,
            updates=updates,
            kept=1 - min(*shrinks, 1.0),
            decay=max(group["weight_decay"] for group in groups),
            rate=max(group["lr"] for group in groups),
        )


def _shrink(optimizer: Any, group: dict[str, Any]) -> float | None:
    """The share of a weight that the decay takes away in one update, beside the gradient of the loss."""
    rate, decay, momentum = (group.get(name, 0.0) for name in ("lr", "weight_decay", "momentum"))
    if not all(isinstance(one, float | int) and math.isfinite(one) for one in (rate, decay, momentum)):
        return None
    name = type(optimizer).__name__
    if decay <= USUAL_DECAY:
        return None
    if name == "SGD":
        return rate * decay / (1 - momentum) if 0 <= momentum < 1 else None
    return rate * decay if name == "AdamW" or group.get("decoupled_weight_decay") else None


def _writers(after: Place, before: Place, names: frozenset[str]) -> Iterator[Place]:
    """The statements that run between two lines of the loop and may write to weights, by functions of these names."""
    is_same = after.file == before.file and _around(after) is _around(before)
    spans = [(after, after.line, before.line)] if is_same else [(after, after.line, _END), (before, 0, before.line)]
    found: set[Place] = set()
    for place, low, high in spans:
        around = _around(place) if place.line else None
        for node in own_nodes(around) if around is not None else ():
            if not isinstance(node, ast.Expr | ast.Assign) or not _writes(node, names, depth=2):
                continue
            if low < node.lineno < high if low < high else not high <= node.lineno <= low:
                found.add(Place(place.file, node.lineno))
    yield from found


def _around(place: Place) -> ast.AST | None:
    tree = syntax_tree(place.file) if place.line else None
    return innermost(tree, place.line, FUNCTIONS) or tree


def _writes(node: ast.AST, names: frozenset[str], depth: int) -> bool:
    """Whether a statement calls something that writes to weights, directly or in a function of the user's."""
    called = {callee(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
    called |= {"data" for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr == "data"}
    if called & names:
        return True
    if not depth:
        return False
    return any(
        isinstance(function, FUNCTIONS)
        and function.name in called
        and any(_writes(statement, names, depth - 1) for statement in function.body)
        for _, tree in user_trees()
        for function in nodes_in(tree)
    )
