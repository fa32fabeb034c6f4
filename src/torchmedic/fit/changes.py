"""Changes of a training script that need less memory, made without editing the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch.utils.checkpoint import checkpoint

from torchmedic.fit.machine import Machine
from torchmedic.replay.fake.changes import backward_without_autocast, gradients_stay
from torchmedic.replay.isolation.torch_state import replaced


class Literal(msgspec.Struct, frozen=True):
    """A number in the source of the script, by its line and column, and what stands there instead."""

    line: int
    column: int
    value: int


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What is different in a run of the script.

    Attributes:
        literals: Numbers in the source that are exchanged.
        arguments: The arguments of the script, if they are others.
        loader: The batch size of every DataLoader that had the size `loader_was`.
        checkpointed: The class whose layers are checkpointed.
        autocast: Whether forward and loss run under bfloat16 autocast.
        update: How optimizers update: `foreach=False` or `fused=True`.
        accumulate: Whether gradients stay from one step to the next, as between two micro-batches.
        spill: Whether tensors that are saved for backward go to the memory of the host.
    """

    literals: tuple[Literal, ...] = ()
    arguments: tuple[str, ...] | None = None
    loader: int | None = None
    loader_was: int | None = None
    checkpointed: str = ""
    autocast: bool = False
    update: str = ""
    accumulate: bool = False
    spill: bool = False

    def with_(self, **fields: Any) -> Change:
        return msgspec.structs.replace(self, **fields)


@contextlib.contextmanager
def applied(change: Change, machine: Machine) -> Iterator[None]:
    """Let the script run with a change; except for exchanged numbers and arguments, which are the runner's."""
    with contextlib.ExitStack() as stack:
        if change.checkpointed:
            stack.enter_context(_checkpointed(change.checkpointed, machine))
        if change.autocast:
            stack.enter_context(backward_without_autocast("cuda"))
            stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16))
        if change.update:
            stack.enter_context(_updating(change.update))
        if change.accumulate:
            stack.enter_context(gradients_stay())
        if change.spill:
            stack.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=False))
        yield


@contextlib.contextmanager
def _checkpointed(name: str, machine: Machine) -> Iterator[None]:
    original: Any = torch.nn.Module.__call__
    inside: list[Any] = []

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        if type(module).__name__ != name or inside or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)

        machine.trace.changed_line = machine.trace.changed_line if machine.trace.changed_line.file else machine.caller()

        def run(*args: Any, **kwargs: Any) -> Any:
            inside.append(module)
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.pop()

        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    with replaced(torch.nn.Module, "__call__", called):
        yield


@contextlib.contextmanager
def _updating(how: str) -> Iterator[None]:
    """Let every optimizer that knows the option update that way, whatever the script says."""
    option, _, value = how.partition("=")
    other = "fused" if option == "foreach" else "foreach"
    original: Any = torch.optim.Optimizer.__init__

    def created(optimizer: Any, params: Any, defaults: Any) -> None:
        if option in defaults:
            defaults[option] = value == "True"
            if other in defaults:
                defaults[other] = None if value == "False" else False
        original(optimizer, params, defaults)

    with replaced(torch.optim.Optimizer, "__init__", created):
        yield
