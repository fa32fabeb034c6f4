"""One layer that stands several times in a container, because a list with it was multiplied: `[Block()] * 6`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from torch import nn

from torchmedic.detect.loop.incident import LoopIncident, OneLayerForSeveral
from torchmedic.observe.loop.ledger import Habits
from torchmedic.source.spots import Place
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_variables import user_trees

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find(habits: Habits) -> Iterator[LoopIncident]:
    steps = [event for event in habits.events if event.kind == "step"]
    repeated = list(_repeated(habits)) if steps else []
    if not repeated:
        return
    for place, kinds in _multiplied():
        for name, layer, times in repeated:
            if type(layer).__name__ in kinds:
                count = sum(parameter.numel() for parameter in layer.parameters())
                kind = type(layer).__name__
                yield OneLayerForSeveral(
                    step=steps[-1].step, cause=place, name=name, kind=kind, times=times, elements=count
                )
                return


def _repeated(habits: Habits) -> Iterator[tuple[str, nn.Module, int]]:
    """The containers of trained models that hold a layer with weights several times, the layer, and how many times."""
    for model in habits.models:
        for name, container in model.named_modules():
            if isinstance(container, _CONTAINERS):
                held = [each for each in container._modules.values() if each is not None]
                for number, times in Counter(map(id, held)).items():
                    layer = next(each for each in held if id(each) == number)
                    if times > 1 and any(parameter.requires_grad for parameter in layer.parameters()):
                        yield name, layer, times


def _multiplied() -> Iterator[tuple[Place, set[str]]]:
    """The lists in the user's code that are multiplied and in which something is built, with the names that are called.

    A list with a variable is left out: a layer that has a name of its own may be shared on purpose.
    """
    for file, tree in user_trees():
        for node in nodes_in(tree):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                lists = [side for side in (node.left, node.right) if isinstance(side, ast.List)]
                kinds = {callee(each) for given in lists for each in given.elts if isinstance(each, ast.Call)}
                if kinds:
                    yield Place(file, node.lineno), kinds
