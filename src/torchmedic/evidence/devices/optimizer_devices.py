"""An optimizer whose state is not where its parameters are."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch

from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.syntax import callee, nodes_in


class Misplaced(NamedTuple):
    """The first tensor of the state that is on another device than its parameter."""

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    key: str
    state: torch.Tensor
    affected: int  # parameters
    total: int


def misplaced_state(frames: list[Frame]) -> Misplaced | None:
    """What an optimizer, whose step is on the stack, keeps on the wrong device; counters may be on the CPU."""
    held = (frame.variables.get("self") for frame in reversed(frames))
    optimizer = next((owner for owner in held if isinstance(owner, torch.optim.Optimizer)), None)
    if optimizer is None:
        return None
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    found = [
        (parameter, key, state)
        for parameter in parameters
        for key, state in dict(optimizer.state.get(parameter, {})).items()
        if isinstance(state, torch.Tensor) and state.dim() and state.device != parameter.device
    ]
    if not found:
        return None
    affected = len({id(parameter) for parameter, _, _ in found})
    return Misplaced(optimizer, *found[0], affected, len(parameters))


def load_of(frames: list[Frame], optimizer: Any) -> tuple[str, ast.AST] | None:
    """The only call of the optimizer's `load_state_dict` in the files of the live frames."""
    found: dict[tuple[str, int], tuple[str, ast.AST]] = {}
    for frame in frames:
        for node in nodes_in(frame.tree if frame.is_user else None):
            if isinstance(node, ast.Call) and callee(node) == "load_state_dict":
                owner = read(node.func.value, frame) if isinstance(node.func, ast.Attribute) else None
                if owner is optimizer:
                    found[frame.file, node.lineno] = (frame.file, node)
    return next(iter(found.values())) if len(found) == 1 else None
