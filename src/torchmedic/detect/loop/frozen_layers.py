"""Layers that are frozen by mistake, or thawed in vain, beside parameters that are trained.

To freeze a part of a model is usual. What cannot be meant, if no line thaws anything: a matrix of zeros, as of an
adapter, which gives zeros for ever; a whole model that was given to the optimizer and still has random values, where no
other layer is trained; all that one of several optimizers holds, while this optimizer goes on to step. And a thawed
parameter has to be in an optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from torchmedic.detect.loop.incident import FrozenLayers, FrozenOptimizer, LoopIncident, ParametersWithoutOptimizer
from torchmedic.observe.checkup.unreached_parameters import WRITES_OF_CONSTRUCTOR
from torchmedic.observe.loop.events import Event
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.live_frames import stack_of
from torchmedic.source.lookup.freezes import is_never_thawed, where_frozen
from torchmedic.source.spots import Place

_MIN_UPDATES = 12
_MAX_MATRICES = 2000  # of a model
_MAX_SAMPLE = 64  # values of a matrix, beside which the rest is looked at only if all of them are zero


def find(habits: Habits, parameters: list[torch.Tensor], steps: list[Event]) -> Iterator[LoopIncident]:
    """Called with the parameters of all optimizers."""
    yield from _stepping_in_vain(habits, steps)
    if len(steps) < _MIN_UPDATES or not all(event.fact.has_gradient for event in steps[-4:]):
        return
    owned = {id(tensor) for tensor in parameters}
    is_any_trained = any(tensor.requires_grad and tensor.dim() > 1 for tensor in parameters)
    for root in called_in_training(habits):
        frozen = [(name, tensor) for name, tensor in _matrices(root) if not tensor.requires_grad]
        if not frozen or not is_never_thawed():
            continue
        is_whole = not is_any_trained and all(id(tensor) in owned for tensor in root.parameters())
        found = frozen if is_whole and all(map(_is_new, frozen)) else _zeros(frozen)
        place = where_frozen(stack_of(sys._getframe()), [tensor for _, tensor in found]) if found else None
        if place is not None:
            watched = habits.optimizers.get(steps[-1].who)
            yield FrozenLayers(
                step=steps[-1].step,
                cause=Place(place.file, place.line),
                names=[name for name, _ in found],
                updates=len(steps),
                is_zero=found is not frozen,
                built=watched.built if watched is not None else None,
            )
            return


def find_thawed(habits: Habits, steps: list[Event]) -> Iterator[LoopIncident]:
    """Parameters that were frozen, require a gradient by now, and are in no optimizer."""
    idle = habits.thaws.idle(habits.owned)
    updates = habits.thaws.looked_at - max((each.step for _, each in idle), default=habits.thaws.looked_at)
    built = next((habits.optimizers[event.who] for event in reversed(steps) if event.who in habits.optimizers), None)
    if updates < _MIN_UPDATES or built is None:
        return
    lost = {id(tensor) for tensor, _ in idle}
    names = [
        path
        for model in habits.models
        for path, layer in model.named_modules()
        if any(id(tensor) in lost for tensor in layer.parameters(recurse=False))
    ]
    yield ParametersWithoutOptimizer(
        step=habits.thaws.looked_at,
        cause=built.built or steps[-1].place,
        optimizer=built.number,
        names=list(dict.fromkeys(names)),
        elements=sum(tensor.numel() for tensor, _ in idle),
        updates=updates,
        update=steps[-1].place,
        sign="",
        signed=None,
        twin=None,
        is_thawed=True,
    )


def _stepping_in_vain(habits: Habits, steps: list[Event]) -> Iterator[LoopIncident]:
    """One of several optimizers steps without a gradient since all its parameters were frozen, and none is thawed."""
    fed = {event.who for event in steps if event.fact.has_gradient}
    for number, watched in habits.optimizers.items():
        own = [event for event in steps if event.who == number][-_MIN_UPDATES:]
        groups = watched.optimizer.param_groups if watched.optimizer is not None else []
        held = [tensor for group in groups for tensor in group["params"]]
        if len(own) < _MIN_UPDATES or any(event.fact.has_gradient for event in own) or not fed - {number}:
            continue
        if not held or any(tensor.requires_grad for tensor in held) or not is_never_thawed():
            continue
        place = where_frozen(stack_of(sys._getframe()), held)
        yield FrozenOptimizer(
            step=own[-1].step,
            cause=Place(place.file, place.line) if place is not None else watched.built or own[-1].place,
            optimizer=number,
            update=own[-1].place,
            updates=len(own),
            held=len(held),
            reached=0,
            elements=0,
            built=watched.built,
        )


def called_in_training(habits: Habits) -> Iterator[nn.Module]:
    """The modules that the loop calls in training mode, with gradients."""
    calls = (event for event in habits.events if event.kind == "forward")
    for number in dict.fromkeys(event.who for event in calls if all(event.fact)):
        module = habits.thing(number)
        if isinstance(module, nn.Module):
            yield module


def _matrices(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The weights of a model, without those in a dict, of which one is chosen at a time."""
    chosen = [path for path, part in root.named_modules() if isinstance(part, nn.ModuleDict | nn.ParameterDict)]
    found: list[tuple[str, torch.Tensor]] = [
        (name, tensor)
        for name, tensor in root.named_parameters()
        if tensor.dim() > 1 and tensor.shape[0] > 1 and not any(name.startswith(f"{path}.") for path in chosen)
    ]
    return found[:_MAX_MATRICES]


def _is_new(named: tuple[str, torch.Tensor]) -> bool:
    return named[1]._version <= WRITES_OF_CONSTRUCTOR and not named[1].is_meta


def _zeros(frozen: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The new parameters that hold only zeros. Waits for the device once, and once more if some samples are zeros."""
    new = [named for named in frozen if _is_new(named) and type(named[1]) is nn.Parameter]
    with torch.no_grad():
        return _all_zero(_all_zero(new, sample=_MAX_SAMPLE), sample=None)


def _all_zero(named: list[tuple[str, torch.Tensor]], sample: int | None) -> list[tuple[str, torch.Tensor]]:
    """The parameters of one device whose first values (`sample` of them, None for all) are zero."""
    device = named[0][1].device if named else None
    named = [each for each in named if each[1].device == device]
    flags = torch.stack([each.reshape(-1)[:sample].any() for _, each in named]).tolist() if named else []
    return [each for each, is_any in zip(named, flags, strict=True) if not is_any]
