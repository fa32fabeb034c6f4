"""Changes of a step that need less memory, as both the cures of an out-of-memory and the plans of `fit` try them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmedic.replay.isolation.torch_state import replaced


@contextlib.contextmanager
def gradients_stay() -> Iterator[None]:
    """Keep gradients from one step to the next, as between two micro-batches."""
    with contextlib.ExitStack() as stack:
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            stack.enter_context(replaced(owner, "zero_grad", lambda *args, **kwargs: None))
        yield


@contextlib.contextmanager
def backward_without_autocast(kind: str) -> Iterator[None]:
    """Autocast is put around the forward pass and the loss, not around backward."""
    engine = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()
        with torch.autocast(kind, enabled=False):
            return engine(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner in (torch.autograd.graph, torch.autograd):
            stack.enter_context(replaced(owner, "_engine_run_backward", run_backward))
        yield


def repeated_layers(modules: Iterable[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Layers of one class that could be checkpointed: several, with parts of their own, none inside another."""
    groups: dict[type, list[torch.nn.Module]] = {}
    for module in modules:
        if any(True for _ in module.children()) and not isinstance(module, _CONTAINERS):
            groups.setdefault(type(module), []).append(module)
    return [group for group in groups.values() if len(group) > 1 and not _is_nested(group)]


_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


def _is_nested(group: list[torch.nn.Module]) -> bool:
    inner = {id(child) for module in group for child in module.modules() if child is not module}
    return any(id(module) in inner for module in group)
