"""Parameters of the user's own, such as weights of a loss or centres of classes, that no optimizer has.

An `nn.Parameter` that is combined with the result of trained layers is meant to be trained. What is kept as it is on
purpose is a module with layers, was loaded, or is written to by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from torchmedic.detect.loop.incident import LoopIncident, ParametersWithoutOptimizer
from torchmedic.observe.checkup.unreached_parameters import WRITES_OF_CONSTRUCTOR
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.reach import Ownerless
from torchmedic.source.lookup.optimizers import chosen_at


def candidates_in(habits: Habits, owned: set[int], min_updates: int) -> dict[int, Ownerless]:
    """Parameters that belong to no layer and to no optimizer, by their identities."""
    known = [(each.reference(), each) for each in habits.reach.bare.values()]
    return {
        id(tensor): each
        for tensor, each in known
        if tensor is not None
        and tensor.requires_grad
        and tensor._version <= WRITES_OF_CONSTRUCTOR
        and id(tensor) not in owned
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
        and habits.steps - each.step >= min_updates
    }


def find(
    habits: Habits,
    candidates: dict[int, Ownerless],
    modules: list[tuple[str, nn.Module]],
    lone: dict[str, torch.Tensor],
    owned: set[int],
    built: Watched,
    steps: list[Event],
) -> Iterator[LoopIncident]:
    """Name the candidates by the variables that hold their modules, or by those in `lone` that hold them."""
    found = next((bare for name, module in modules if (bare := _bare(name, module, candidates, owned))), {})
    found = found or {name: tensor for name, tensor in lone.items() if id(tensor) in candidates}
    if not found or any(candidates[id(tensor)].is_written() for tensor in found.values()):
        return
    yield ParametersWithoutOptimizer(
        step=steps[-1].step,
        cause=chosen_at(built.built or steps[-1].place, built.caller),
        optimizer=built.number,
        names=list(found),
        elements=sum(tensor.numel() for tensor in found.values()),
        updates=habits.steps - max(candidates[id(tensor)].step for tensor in found.values()),
        update=steps[-1].place,
        are_bare=True,
    )


def _bare(name: str, root: nn.Module, candidates: dict[int, Ownerless], owned: set[int]) -> dict[str, torch.Tensor]:
    """The candidates of a module that has nothing else, or of modules in it that have trained parameters as well."""
    own = dict(root.named_parameters())
    if own and all(id(tensor) in candidates for tensor in own.values()) and not _is_of_torch(root):
        return {f"{name}.{path}".lstrip("."): tensor for path, tensor in own.items()}
    return {
        f"{name}.{path}.{key}".replace("..", ".").lstrip("."): tensor
        for path, module in root.named_modules()
        if not _is_of_torch(module) and any(id(tensor) in owned for tensor in module.parameters())
        for key, tensor in module._parameters.items()
        if tensor is not None and id(tensor) in candidates
    }


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
