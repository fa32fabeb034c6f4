"""The result of a replay: backward calls, updates, loss, gradients, or the exception."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.objects.finite import is_finite
from torchmedic.source.objects.graph import leaves_behind


class BackwardCall(NamedTuple):
    """A call of backward in a replay: its roots, and the user's lines that led to it."""

    roots: tuple[torch.Tensor, ...]
    stack: tuple[Spot, ...]  # the user's lines, innermost first
    keeps_graph: bool = False  # the code says so
    inputs: tuple[torch.Tensor, ...] = ()  # what `autograd.grad` is asked for

    @property
    def spot(self) -> Spot | None:
        return self.stack[0] if self.stack else None


def start_of(statement: ast.stmt) -> tuple[int, int]:
    """Line and column of a statement: several may stand on one line."""
    return statement.lineno, statement.col_offset


class ReplayResult:
    """What a replay of a segment has shown."""

    def __init__(self, *, answers: bool = False) -> None:
        self.answers = answers  # exchanges before the end of a backward are answered by this rank itself
        self.answered = False  # that has happened
        self.namespace: dict[str, Any] = {}
        self.backward_calls: list[BackwardCall] = []  # those of the step itself, not of a checkpoint inside one
        self.updates: list[tuple[Any, int]] = []  # optimizers that were stepped, after how many backward calls
        self.returned: list[torch.Tensor] = []  # gradients that `autograd.grad` gave
        self.error: BaseException | None = None
        self.exchanged = False  # the step has a backward, and calls a collective by hand
        self.received: dict[int, ast.stmt] = {}  # what took a message of another rank, by the address of its values
        self.stood_in = False  # parts of the weights, which other ranks hold, were stood in for
        self.loss: float | None = None
        self.loss_finite = False
        self.gradients_finite: bool | None = None
        self.taken: dict[str, Any] = {}  # what was taken over from the step, by name
        self.drew_random: set[tuple[int, int]] = (
            set()
        )  # assignments, by their start, that drew random numbers and computed nothing
        self.made_data: set[tuple[int, int]] = set()  # all assignments, by their start, that computed nothing
        self.module_calls = 0
        self.seconds = 0.0

    @property
    def roots(self) -> list[torch.Tensor]:
        """Every tensor that backward was called on, in order."""
        return [root for call in self.backward_calls for root in call.roots]

    def judge(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note whether loss and gradients are finite, before they are put back."""
        values = [root.detach() for root in self.roots if root.is_floating_point() and root.numel()]
        if values and values[-1].numel() == 1 and not values[-1].is_meta:
            self.loss = float(values[-1].item())
        self.loss_finite = bool(values) and all(is_finite(value) for value in values)
        leaves = {id(tensor): tensor for tensor in [*parameters, *leaves_behind(self.roots)]}
        gradients = [tensor.grad for tensor in leaves.values() if tensor.grad is not None] + self.returned
        self.gradients_finite = all(is_finite(gradient) for gradient in gradients) if gradients else None
