"""Which layer gave a tensor its size, and where the user built it.

At a loss the model has already returned, so no frame of it is left. But the tensor's autograd graph leads to the
parameters of the layer that made it, and the model is still held by a variable, or by an attribute of a trainer.
"""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.layer_construction import (
    _built_in_class,
    built_at,
    built_below,
    given_modules,
    held_modules,
)
from torchmedic.source.lookup.origins import origin_of, user_argument
from torchmedic.source.objects.graph import walk

_MAX_NODES = 64  # of the graph behind a tensor: far enough for a head with its softmax and its reshaping


def maker_of(tensor: torch.Tensor, size: int, frames: list[Frame]) -> torch.nn.Module | None:
    """The layer whose parameter gives a tensor this size; without a graph, the only layer that could."""
    parameter = _parameter_behind(tensor, size)
    owned = [
        module
        for root in roots(frames)
        for module in root.modules()
        if any(held is parameter if parameter is not None else False for held in module._parameters.values())
        or (parameter is None and _outputs(module) == size)
    ]
    distinct = list({id(module): module for module in owned}.values())
    return distinct[0] if len(distinct) == 1 else None


def layer_built_at(frames: list[Frame], layer: torch.nn.Module, label: str) -> Location | None:
    """The line that built a layer, also when an attribute of a trainer holds the model."""
    found = built_at(frames, layer, label)
    if found is not None:
        return found
    for _, owner, name, root in held_modules(frames):
        path = next((path for path, module in root.named_modules() if module is layer), None)
        if path is None or owner is None:
            continue
        node = _built_in_class(type(owner), f"{name}.{path}".rstrip("."))
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    for root in given_modules(frames):
        path = next((path for path, module in root.named_modules() if module is layer), None)
        node = built_below(root, path, type(layer)) if path else None
        if node is not None:
            return node_location("origin", node[0], node[1], label)
    return None


def table_built_at(frames: list[Frame], table: Any, layer: torch.nn.Module | None, label: str) -> Location | None:
    """The line that made a table: the layer that holds it, the attribute that it is, or the variable."""
    if layer is not None:
        return layer_built_at(frames, layer, label)
    if table is None:
        return None
    for root in roots(frames):
        for module in root.modules():
            for name, held in [*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()]:
                if held is table:
                    node = _built_in_class(type(module), name)
                    if node is not None:
                        return node_location("origin", node[0], node[1], label)
    passed = user_argument(frames, table)
    if passed is None:
        return None
    origin = origin_of(frames, passed[0], passed[1].node)
    return None if origin is None else origin.location("origin", label)


def roots(frames: list[Frame]) -> list[torch.nn.Module]:
    """The modules that the user's live frames hold, the innermost frame's first, each once."""
    return list({id(module): module for *_, module in held_modules(frames)}.values())


def _outputs(module: torch.nn.Module) -> int | None:
    for name in ("out_features", "out_channels"):
        size = module.__dict__.get(name)
        if isinstance(size, int):
            return size
    return None


def _parameter_behind(tensor: torch.Tensor, size: int) -> torch.Tensor | None:
    """The nearest parameter in the graph of a tensor that has this size."""
    for node in walk([tensor.grad_fn], most=_MAX_NODES, nearest_first=True):
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, torch.Tensor) and size in parameter.shape:
            return parameter
    return None
