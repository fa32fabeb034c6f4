"""Layers that get a gradient in every step and that no optimizer has, where that cannot be meant.

A layer without an optimizer is often meant: a backbone that is kept, a network that only gives a loss, the target of
a distillation. So all of this must hold: the layer still has the values of its constructor (nobody loaded, copied,
initialised or updated it), and either gradients of trained layers of the same model pass through it on their way from
the loss, as through a head, or the loop treats it as trained (`decoder.train()`, `encoder.zero_grad()`), or two
optimizers have the very same parameters, so that one of them was meant for this layer. A layer for classes behind a
module that the optimizer was given counts as a part of the same model, and so does any head beside several such
modules. So does a decoder that is to give back what the model was given, or that has a table for tokens. So does a
network with a term of the loss that reaches no parameter of an optimizer, as a critic beside an actor, and so do all
layers of a model of which an optimizer has the biases only. A selection of single parameters by a condition and an
optimizer that is built later keep this module silent.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from torchmedic.detect.loop import bare_parameters
from torchmedic.detect.loop.chosen_parameters import is_chosen
from torchmedic.detect.loop.incident import LoopIncident, ParametersWithoutOptimizer
from torchmedic.observe.checkup.unreached_parameters import WRITES_OF_CONSTRUCTOR
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.reach import Ownerless
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.layer_construction import given_modules, held_modules
from torchmedic.source.lookup.optimizer_parameters import chosen_at
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, nodes_in, syntax_tree
from torchmedic.source.user_variables import looks_at_locals

_MIN_UPDATES = 12  # that left the layer as it was
_MIN_TURNS = 8  # of two optimizers with the same parameters
_MIN_LISTED_MODULES = 2  # that an optimizer was given one by one
_KINDS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


class _Held(NamedTuple):
    """A module that a variable or an attribute of the user's holds, under this name."""

    module: nn.Module
    name: str
    file: str


def find(habits: Habits, owned: set[int], steps: list[Event]) -> Iterator[LoopIncident]:
    candidates, weights = (
        {
            id(tensor): each
            for each in known.values()
            if habits.steps - each.step >= _MIN_UPDATES
            and (tensor := _untouched(each)) is not None
            and id(tensor) not in owned
        }
        for known in (habits.reach.ownerless, habits.reach.weights)
    )
    stepping = [habits.optimizers[number] for number in {event.who for event in steps} if number in habits.optimizers]
    built = next((watched for watched in stepping if watched.built is not None), None)
    bare = bare_parameters.candidates_in(habits, owned, _MIN_UPDATES)
    if not (candidates or bare or weights) or built is None or is_chosen(habits):
        return
    lone: dict[str, torch.Tensor] = {}
    held = list(_held(sys._getframe(), lone))
    if (bare or weights) and all(event.fact.has_gradient for event in steps[-4:]):
        modules = [(each.name, each.module) for each in held]
        incidents = list(bare_parameters.find(habits, bare, modules, lone, owned, built, steps))
        incidents = incidents or list(bare_parameters.find_beside_biases(habits, weights, modules, owned, built, steps))
        if incidents:
            yield from incidents
            return
    found: dict[str, nn.Module] = {}
    sign, signed = "", None
    if all(event.fact.has_gradient for event in steps[-4:]):
        found = _between(held, candidates, owned) or _beside(held, candidates, owned)
        found = found or _alone(held, candidates, owned)
        found = found or _decoders(held, candidates, owned)
    twin = None
    if not found and (pair := _with_equal_parameters(stepping, steps)) is not None:
        parts = [_Held(part, name, each.file) for each in held for name, part in each.module.named_children()]
        apart = _without_optimizer(held + parts, candidates, owned)
        found = next((layers for each, layers in apart if each.module.training), {})
        reached = min((candidates[id(layer.weight)].step for layer in found.values()), default=0)
        user = next((event.who for event in steps if event.step >= reached), 0)
        graded = {event.who for event in steps if event.fact.has_gradient}
        user = next((watched.number for watched in pair if watched.number not in graded), user)  # steps in vain
        if found:
            built, twin = pair if pair[0].number == user else pair[::-1]
    if not found and all(event.fact.has_gradient for event in steps[-4:]):
        found, sign, signed = _treated_as_trained(held, candidates, owned)
    lost = [candidates[id(layer.weight)] for layer in found.values()]
    if not found or any(each.is_written() for each in lost):
        return
    yield ParametersWithoutOptimizer(
        step=steps[-1].step,
        cause=chosen_at(built.built or steps[-1].place, built.caller, found),
        optimizer=built.number,
        names=list(found),
        elements=sum(parameter.numel() for layer in found.values() for parameter in layer.parameters()),
        updates=habits.steps - max(each.step for each in lost),
        update=steps[-1].place,
        sign=sign,
        signed=signed,
        twin=twin.built if twin is not None else None,
    )


def _untouched(each: Ownerless) -> torch.Tensor | None:
    """A weight that has the values of its constructor, as far as can be told without a look at them."""
    tensor = each.reference()
    if tensor is None or not tensor.requires_grad or tensor._version != WRITES_OF_CONSTRUCTOR:
        return None
    has_hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return None if has_hooks else tensor


def _held(frame: FrameType | None, lone: dict[str, torch.Tensor]) -> Iterator[_Held]:
    """The modules that the frames hold; parameters that variables hold are added to `lone` by name."""
    frames: list[Frame] = []
    while frame is not None:
        if not looks_at_locals(frame.f_code):
            frames.append(Frame(frame, frame.f_lasti, frame.f_lineno))
        frame = frame.f_back
    seen: set[int] = set()
    for holder, _, name, module in held_modules(frames[::-1]):
        if id(module) not in seen:
            seen.add(id(module))
            yield _Held(module, name, holder.file)
    for module in given_modules(frames[::-1]):
        if id(module) not in seen:
            seen.add(id(module))
            yield _Held(module, "", "")
    for each in frames:
        if each.is_user:
            lone |= {name: value for name, value in each.variables.items() if type(value) is nn.Parameter}
        if each.live.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            each.variables.clear()  # a copy kept by the frame, which would hold every tensor past its time


def _layers(module: nn.Module, candidates: dict[int, Ownerless]) -> dict[str, nn.Module]:
    """The layers of a module that no optimizer has, by their paths."""
    return {
        path: layer
        for path, layer in module.named_modules()
        if type(layer) in _KINDS and id(layer.weight) in candidates
    }


def _between(held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]) -> dict[str, nn.Module]:
    """Layers of a model between its trained layers and the loss."""
    for module, _, _ in held:
        if not _has_owned(module, owned):
            continue
        layers = _layers(module, candidates)
        found = {path: layer for path, layer in layers.items() if candidates[id(layer.weight)].is_between}
        if found:
            return found
    return {}


def _without_optimizer(
    held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]
) -> Iterator[tuple[_Held, dict[str, nn.Module]]]:
    """The modules of which no optimizer has any part, each with its layers by their names."""
    for each in held:
        layers = _layers(each.module, candidates)
        if layers and each.name and not _has_owned(each.module, owned):
            yield each, {f"{each.name}.{path}".rstrip("."): layer for path, layer in layers.items()}


def _beside(held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]) -> dict[str, nn.Module]:
    """Heads that were left out: a layer for classes, or a head beside two modules or more that the optimizer was given.

    A network that only gives a loss is larger than a head, or stands in evaluation mode. A random layer that is meant
    to stay as it is measures something else than classes, or has `requires_grad` off.
    """
    listed = [each for each in held if each.name and _is_owned(each.module, owned)]
    trained = sum(tensor.numel() for each in listed for tensor in each.module.parameters())
    has_all = {id(tensor) for each in listed for tensor in each.module.parameters()} >= owned
    if not listed or not has_all:
        return {}
    found: dict[str, nn.Module] = {}
    for (module, _, file), layers in _without_optimizer(held, candidates, owned):
        is_small = sum(tensor.numel() for tensor in module.parameters()) < trained
        is_classifier = type(module) in _KINDS and candidates[id(module.weight)].classifies
        is_left_out = len(listed) >= _MIN_LISTED_MODULES or is_classifier
        is_head = module.training and is_small and any(each.file == file for each in listed)
        if is_left_out and is_head and all(candidates[id(layer.weight)].is_between for layer in layers.values()):
            found |= layers
    return found


def _alone(held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]) -> dict[str, nn.Module]:
    """Layers with a term of the loss that can teach nobody else, as a critic beside an actor."""
    for each, layers in _without_optimizer(held, candidates, owned):
        if each.module.training and all(candidates[id(layer.weight)].is_alone for layer in layers.values()):
            return layers
    return {}


def _decoders(held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]) -> dict[str, nn.Module]:
    """A network between a trained network and the loss that only makes sense if it is trained, too.

    It is to give back what the model was given, or has a table of its own for tokens, with random values.
    """
    trained = {each.file for each in held if each.name and _is_owned(each.module, owned)}
    for (module, _, file), layers in _without_optimizer(held, candidates, owned):
        if not module.training or file not in trained:
            continue
        has_table = any(
            isinstance(layer, nn.Embedding) and layer.weight.requires_grad and layer.weight.grad is not None
            for layer in module.modules()
        )
        known = [candidates[id(layer.weight)] for layer in layers.values()]
        if any(each.is_between and (each.gives_back or has_table) for each in known):
            return layers
    return {}


def _is_owned(module: nn.Module, owned: set[int]) -> bool:
    parameters = [id(tensor) for tensor in module.parameters()]
    return bool(parameters) and owned >= set(parameters)


def _has_owned(module: nn.Module, owned: set[int]) -> bool:
    return any(id(tensor) in owned for tensor in module.parameters())


def _treated_as_trained(
    held: list[_Held], candidates: dict[int, Ownerless], owned: set[int]
) -> tuple[dict[str, nn.Module], str, Place | None]:
    """Layers of a model that no optimizer has at all, and the line that treats the model as one that is trained.

    Where an optimizer trains an input, as in an attack, gradients of a model are cleared to be rid of them. A network
    with a loss of its own may be there for its gradients.
    """
    trains_model = any(_is_owned(each.module, owned) for each in held)
    for (_, name, file), layers in _without_optimizer(held, candidates, owned):
        is_cleared = trains_model and not any(candidates[id(layer.weight)].is_foreign for layer in layers.values())
        for node in nodes_in(syntax_tree(file)):
            if isinstance(node, ast.Call) and _is_sign(node, name, is_cleared=is_cleared):
                return layers, ast.unparse(node), Place(file, node.lineno)
    return {}, "", None


def _with_equal_parameters(stepping: list[Watched], steps: list[Event]) -> tuple[Watched, Watched] | None:
    """Two optimizers that step in turn, not one after the other is done, and have exactly the same parameters."""
    for first, second in itertools.combinations(stepping, 2):
        whose = [event.who for event in steps if event.who in (first.number, second.number)]
        if sum(before != after for before, after in itertools.pairwise(whose)) < _MIN_TURNS:
            continue
        sets = [
            set(map(id, watched.parameters))
            for watched in (first, second)
            if watched.optimizer is not None and watched.built is not None
        ]
        if len(sets) == 2 and sets[0] == sets[1]:
            return first, second
    return None


def _is_sign(call: ast.Call, name: str, *, is_cleared: bool) -> bool:
    """Whether a call is `name.train()`, or clips or clears the gradients of `name`."""
    match call:
        case ast.Call(func=ast.Attribute(value=value, attr="zero_grad")):
            return is_cleared and ast.unparse(value).removeprefix("self.") == name
        case ast.Call(func=ast.Attribute(value=value, attr="train"), args=[], keywords=[]):
            return ast.unparse(value).removeprefix("self.") == name
        case ast.Call(args=[first, *_]) if callee(call) in ("clip_grad_norm_", "clip_grad_value_"):
            return ast.unparse(first).removeprefix("self.") == f"{name}.parameters()"
    return False
