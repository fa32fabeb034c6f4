"""Parameters of the user's own, such as weights of a loss or centres of classes, that no optimizer has.

An `nn.Parameter` that is combined with the result of trained layers is meant to be trained. What is kept as it is on
purpose is a module with layers, was loaded, or is written to by hand. The same goes for a plain tensor with
`requires_grad=True` that a module holds, unless the script asks for its gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from torchmedic.detect.loop.incident import LoopIncident, ParametersWithoutOptimizer, UnregisteredLayers
from torchmedic.observe.checkup.unreached_parameters import WRITES_OF_CONSTRUCTOR
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.reach import Ownerless
from torchmedic.source.lookup.optimizer_parameters import chosen_at
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_variables import user_trees

_MIN_UPDATES = 12  # that left a tensor as it was
_MIN_LAYERS = 2  # with biases that are trained
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def candidates_in(habits: Habits, owned: set[int], min_updates: int) -> dict[int, Ownerless]:
    """Parameters that belong to no layer and to no optimizer, by their identities."""
    return _lasting(habits, habits.reach.bare, owned, min_updates)


def _lasting(habits: Habits, among: dict[int, Ownerless], owned: set[int], min_updates: int) -> dict[int, Ownerless]:
    known = [(each.reference(), each) for each in among.values()]
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


def find_beside_biases(
    habits: Habits,
    weights: dict[int, Ownerless],
    modules: list[tuple[str, nn.Module]],
    owned: set[int],
    built: Watched,
    steps: list[Event],
) -> Iterator[LoopIncident]:
    """All weights of the layers of a model, where an optimizer has the biases of each and not one weight."""
    for _, root in modules:
        layers = [(path, layer) for path, layer in root.named_modules() if isinstance(layer, _LAYERS)]
        if len(layers) < _MIN_LAYERS or not all(
            id(layer.weight) in weights and id(layer.bias) in owned for _, layer in layers
        ):
            continue
        lost = [weights[id(layer.weight)] for _, layer in layers]
        if not any(each.is_written() for each in lost):
            yield ParametersWithoutOptimizer(
                step=steps[-1].step,
                cause=chosen_at(built.built or steps[-1].place, built.caller),
                optimizer=built.number,
                names=[f"{path}.weight" for path, _ in layers],
                elements=sum(layer.weight.numel() for _, layer in layers),
                updates=habits.steps - max(each.step for each in lost),
                update=steps[-1].place,
                are_bare=True,
                has_biases=True,
            )
            return


def find_plain(habits: Habits, owned: set[int], roots: list[nn.Module], steps: list[Event]) -> Iterator[LoopIncident]:
    """A tensor that a module of the loop holds and that is no parameter of it, so that no optimizer has got it."""
    candidates = _lasting(habits, habits.reach.plain, owned, _MIN_UPDATES)
    if not candidates or not all(event.fact.has_gradient for event in steps[-4:]):
        return
    for root in roots:
        for path, module in root.named_modules():
            for name, held in vars(module).items():
                one = candidates.get(id(held))
                tensor = one.reference() if one is not None else None
                if one is None or tensor is None or one.is_written() or _is_asked_for(name):
                    continue
                yield UnregisteredLayers(
                    step=steps[-1].step,
                    cause=steps[-1].place,
                    module=type(module),
                    path=path,
                    name=name,
                    kind="tensor",
                    layers=1,
                    holds_modules=False,
                    tensors=1,
                    elements=tensor.numel(),
                )
                return


def _is_asked_for(name: str) -> bool:
    """Whether the script reads the gradient of what has this name, computes it, or has an optimizer for it later."""
    for _, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr="grad") if owner == name:
                    return True
                case ast.Call() if callee(node) == "grad" or hasattr(torch.optim, callee(node) or "-"):
                    if any(getattr(part, "attr", getattr(part, "id", "")) == name for part in ast.walk(node)):
                        return True
    return False


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
