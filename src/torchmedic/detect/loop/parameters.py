"""Which optimizer owns which parameter, and what is trained by nobody although the loss reaches it.

Many loops leave parameters out on purpose: a backbone that is not trained, a network that only gives a loss. So a
parameter without an optimizer is no finding by itself. What cannot be meant: layers in a plain list beside others that
are all trained; an optimizer that still holds what was replaced; optimizers that all hold what no loss reaches; a layer
as it was built, at a place where only a trained layer makes sense (`ownerless`).
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchmedic.detect.loop import bare_parameters, frozen_layers, new_layers, new_leaves, ownerless
from torchmedic.detect.loop.incident import (
    FrozenOptimizer,
    GradientsKeptBack,
    LoopIncident,
    NothingLoaded,
    OptimizerOfOriginal,
    OptimizerOfOtherModel,
    OptimizerOfTwin,
    ReplacedParameters,
    UnregisteredLayers,
)
from torchmedic.detect.loop.shards import SYNC_SWITCH, shards_of
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.lookup.optimizer_parameters import chosen_at
from torchmedic.source.lookup.unread_results import unread_results
from torchmedic.source.spots import Place
from torchmedic.source.syntax import FUNCTIONS, calls_in, has_line, innermost, nodes_in, syntax_tree
from torchmedic.source.user_variables import user_trees

_MIN_STEPS = 4
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")  # several may take the place of one weight
_MIN_TWIN_TENSORS = 3  # of a model whose copy is taken for it


def find(habits: Habits) -> Iterator[LoopIncident]:
    reach = habits.reach
    steps = [event for event in habits.events if event.kind == "step" and event.step >= reach.since]
    living = [watched.optimizer for watched in habits.optimizers.values() if watched.optimizer is not None]
    if len(steps) < _MIN_STEPS or not living or not reach.complete or reach.walks < 3:
        return
    for load in habits.unmatched:
        module = habits.thing(load.module)
        if load.place.line and module is not None and load.given not in dict(module.named_parameters()):
            yield NothingLoaded(step=steps[-1].step, cause=load.place, load=load)
    yield from new_leaves.find(habits, steps)
    yield from new_layers.find(habits, steps)
    yield from _original(habits, steps)
    yield from frozen_layers.find_thawed(habits, steps)
    held = [tensor for optimizer in living for tensor in parameters_of(optimizer)]
    yield from frozen_layers.find(habits, held, steps)
    owned = {id(tensor) for tensor in held}
    roots = _roots(habits)
    yield from bare_parameters.find_plain(habits, owned, roots, steps)
    nobodys = [
        tensor
        for tensor, reached in reach.living()
        if id(tensor) not in owned
        and tensor._version == reached.writes
        and habits.steps - reached.step >= _MIN_STEPS - 1
    ]
    if not nobodys:
        return
    found = list(_unregistered(habits, nobodys, owned, roots, steps))
    found = found or list(_replaced(habits, nobodys, owned, roots, steps)) or list(_twin(habits, nobodys, roots, steps))
    yield from found or list(_useless(habits, nobodys, roots, steps)) or ownerless.find(habits, owned, steps)


def _roots(habits: Habits) -> list[nn.Module]:
    """The modules that the loop calls."""
    forwards = (event for event in habits.events if event.kind == "forward" and event.step >= habits.reach.since)
    numbers = dict.fromkeys(event.who for event in forwards)
    return [module for number in numbers if isinstance(module := habits.thing(number), nn.Module)]


def _is_result_unread(built: Place | None, update: Place) -> bool:
    """Whether the function that updates calls the model that an optimizer was given, and never reads the result."""
    if built is None:
        return False
    calls = (node for node in nodes_in(syntax_tree(built.file)) if isinstance(node, ast.Call))
    given = {
        ast.unparse(call.func.value)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "parameters" and has_line(call, built.line)
    }
    function = innermost(syntax_tree(update.file), update.line, FUNCTIONS)
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in given
        for statement, _ in (unread_results(function) if function is not None else ())
        for node in ast.walk(statement)
    )


def _unregistered(
    habits: Habits, nobodys: list[torch.Tensor], owned: set[int], roots: list[nn.Module], steps: list[Event]
) -> Iterator[LoopIncident]:
    """Layers in a list or dict of Python's, which `parameters()` does not see; all others are trained."""
    reached = habits.reach.found
    wanted = {id(tensor) for tensor in nobodys}
    for root in roots:
        listed = {id(tensor) for tensor in root.parameters()}
        trained = listed & set(reached)
        if not trained or not trained <= owned:
            continue
        for path, module in root.named_modules():
            for name, held in vars(module).items():
                hidden = _hidden(held) if not name.startswith("_") else []
                lost = [tensor for tensor in hidden if id(tensor) in wanted and id(tensor) not in listed]
                if len(hidden) < 2 or not lost:
                    continue
                yield UnregisteredLayers(
                    step=steps[-1].step,
                    cause=steps[-1].place,
                    module=type(module),
                    path=path,
                    name=name,
                    kind=type(held).__name__,
                    layers=len(held),
                    holds_modules=any(isinstance(item, nn.Module) for item in _items(held)),
                    tensors=len(lost),
                    elements=sum(tensor.numel() for tensor in lost),
                )
                return


def _items(held: Any) -> list[Any]:
    return list(held.values()) if type(held) is dict else list(held)


def _hidden(held: Any) -> list[torch.Tensor]:
    """The parameters in a container with two layers or more. One alone in a list is a known way to hide it."""
    if type(held) not in (list, tuple, dict) or not 2 <= len(held) <= 1000:
        return []
    items = _items(held)
    if not all(isinstance(item, nn.Module | nn.Parameter) for item in items):
        return []
    if all(isinstance(item, nn.Module) and not item.training for item in items):
        return []  # `model.train()` does not reach them: somebody has set them up for evaluation, as for a loss
    return [tensor for item in items for tensor in (item.parameters() if isinstance(item, nn.Module) else [item])]


def _replaced(
    habits: Habits, nobodys: list[torch.Tensor], owned: set[int], roots: list[nn.Module], steps: list[Event]
) -> Iterator[LoopIncident]:
    """An optimizer holds parameters that are no longer in the model, and not those that took their places."""
    reached = habits.reach.found
    in_models = {id(tensor) for root in roots for tensor in root.parameters()}
    for root in roots:
        named = [(name, tensor) for name, tensor in root.named_parameters() if id(tensor) in reached]
        new = [(name, tensor) for name, tensor in named if any(tensor is one for one in nobodys)]
        fresh = {id(tensor) for _, tensor in new}
        if not new or len(new) == len(named) or any(id(t) not in owned | fresh for _, t in named):
            continue
        for watched in habits.optimizers.values():
            mine = watched.parameters
            old = [t for t in mine if id(t) not in in_models and id(t) not in reached and t.grad is None]
            places = {_PARAMETRIZED.sub(r"\1", name): tensor for name, tensor in new}
            is_fed = any(id(tensor) in reached for tensor in mine)
            if is_fed and (_match(old, list(places.values())) or _are_in_no_module(old)):
                yield ReplacedParameters(
                    step=steps[-1].step,
                    cause=chosen_at(watched.built or steps[-1].place, watched.caller),
                    optimizer=watched.number,
                    names=[name for name, _ in new],
                    elements=sum(tensor.numel() for _, tensor in new),
                    old=[tuple(tensor.shape) for tensor in old],
                )
                return


def _are_in_no_module(tensors: list[torch.Tensor]) -> bool:
    """Whether no module has these parameters any more: a layer that is replaced by another kind of layer is gone."""
    return bool(tensors) and not any(type(holder) is dict for holder in gc.get_referrers(*tensors))


def _twin(
    habits: Habits, nobodys: list[torch.Tensor], roots: list[nn.Module], steps: list[Event]
) -> Iterator[LoopIncident]:
    """An optimizer holds a model that no loss reaches, and not its copy, which the loss does reach."""
    reached = habits.reach.found
    shapes = [tensor.shape for tensor in nobodys]
    for watched in habits.optimizers.values():
        mine = watched.parameters
        unused = [
            tensor for tensor in mine if tensor.requires_grad and id(tensor) not in reached and tensor.grad is None
        ]
        is_twin = sorted(tensor.shape for tensor in unused) == sorted(shapes) and len(shapes) >= _MIN_TWIN_TENSORS
        own = [event for event in steps if event.who == watched.number]
        steps_in_vain = len(own) >= _MIN_STEPS and not any(event.fact.has_gradient for event in own)
        others_are_fed = any(event.fact.has_gradient for event in steps)
        if is_twin and (any(id(tensor) in reached for tensor in mine) or (steps_in_vain and others_are_fed)):
            wanted = {id(tensor) for tensor in nobodys}
            named = [name for root in roots for name, tensor in root.named_parameters() if id(tensor) in wanted]
            yield OptimizerOfTwin(
                step=steps[-1].step,
                cause=chosen_at(watched.built or steps[-1].place, watched.caller),
                optimizer=watched.number,
                names=named,
                elements=sum(tensor.numel() for tensor in nobodys),
                old=[tuple(tensor.shape) for tensor in unused],
            )
            return


def _original(habits: Habits, steps: list[Event]) -> Iterator[LoopIncident]:
    """An optimizer steps in vain for a model of which each loss is computed with a copy that is dropped."""
    gone = Counter(reached.shape for reached in habits.reach.found.values() if reached.reference() is None)
    for number in dict.fromkeys(event.who for event in steps):
        watched, own = habits.optimizers.get(number), [event for event in steps if event.who == number]
        held = parameters_of(watched.optimizer) if watched is not None and watched.optimizer is not None else []
        is_in_vain = len(own) >= _MIN_STEPS and not any(event.fact.has_gradient for event in own)
        if not is_in_vain or len(held) < _MIN_TWIN_TENSORS or not all(tensor.requires_grad for tensor in held):
            continue
        if not any(event.fact.has_gradient for event in steps) or Counter(tensor.shape for tensor in held) - gone:
            continue
        copies = [Place(file, call.lineno) for file, tree in user_trees() for call in calls_in(tree, "deepcopy")]
        cause = copies[0] if len(copies) == 1 else own[-1].place
        yield OptimizerOfOriginal(
            step=own[-1].step, cause=cause, optimizer=number, update=own[-1].place, updates=len(own), held=len(held)
        )


def _match(old: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
    return len(old) == len(new) and all(a.dim() == b.dim() for a, b in zip(old, new, strict=True))


def _useless(
    habits: Habits, nobodys: list[torch.Tensor], roots: list[nn.Module], steps: list[Event]
) -> Iterator[LoopIncident]:
    """No update of any optimizer had a single gradient to work with, and the loss reaches other parameters."""
    if any(event.fact.has_gradient for event in steps):
        return
    reached = habits.reach.found
    stepping = {event.who for event in steps}
    watched = [habits.optimizers[number] for number in stepping if number in habits.optimizers]
    mine = [tensor for each in watched for tensor in each.parameters]
    if not mine or any(id(tensor) in reached for tensor in mine):
        return
    if _is_result_unread(watched[0].built, steps[-1].place):
        return  # the optimizer is right: what its model gives is not used
    frozen = [tensor for tensor in mine if not tensor.requires_grad]
    facts: dict[str, Any] = {
        "step": steps[-1].step,
        "cause": chosen_at(watched[0].built or steps[-1].place, watched[0].caller),
        "optimizer": watched[0].number,
        "update": steps[-1].place,
        "updates": len(steps),
        "held": len(mine),
        "reached": len(nobodys),
        "elements": sum(tensor.numel() for tensor in nobodys),
    }
    if len(frozen) == len(mine):
        yield FrozenOptimizer(**facts)
    elif shards_of(roots, [id(tensor) for tensor in mine]):
        calls = [Place(file, call.lineno) for file, tree in user_trees() for call in calls_in(tree, SYNC_SWITCH)]
        yield GradientsKeptBack(**facts | ({"cause": calls[0]} if len(calls) == 1 else {"cause": steps[-1].place}))
    else:
        is_called = bool(_calls_of(habits, mine))
        yield OptimizerOfOtherModel(
            **facts, forward=next(iter(_calls_of(habits, nobodys)), None) if is_called else None
        )


def _calls_of(habits: Habits, tensors: list[torch.Tensor]) -> list[Place]:
    """The lines that call a model with these parameters, those with gradients first."""
    wanted = {id(tensor) for tensor in tensors}
    calls = [
        event
        for event in habits.events
        if event.kind == "forward" and event.place.line and isinstance(model := habits.thing(event.who), nn.Module)
        if not wanted.isdisjoint(map(id, model.parameters()))
    ]
    return [event.place for event in sorted(calls, key=lambda event: not event.fact.with_gradients)]
