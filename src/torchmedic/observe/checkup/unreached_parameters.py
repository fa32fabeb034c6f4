"""Parameters of an optimizer that never get a gradient, watched until that is sure.

At the first step of an optimizer its parameters without a gradient are noted; in later steps only those are asked
again, and one that gets its turn is forgotten. Where all have gradients, as nearly always, nothing is left to ask.
Otherwise one step of that optimizer is watched for what cuts them off.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torchmedic.observe.checkup.graph_cuts import GraphCuts
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.graph import leaves_behind

WRITES_OF_CONSTRUCTOR = 1  # to the weight of a layer of torch's: its initial values
_MIN_STEPS = 24  # of its optimizer, after which a parameter without a gradient is reported
_MIN_STEPS_OF_WHOLE = 48  # where no parameter of an optimizer has a gradient: its turn may come later
_MAX_TURNS = 16  # steps of other optimizers while cuts are watched
_MIN_STEPS_AT_END = 3  # of a script that has come to its end


class Missing:
    """A parameter without a gradient, and what it was like when it was noted."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self._address = _address(tensor)
        self._writes = tensor._version
        self._total = _total(tensor)

    def is_written(self) -> bool:
        """Whether somebody else than the optimizer has changed it: a moving average, say."""
        tensor = self.reference()
        if tensor is None or tensor._version != self._writes or _address(tensor) != self._address:
            return True
        total = _total(tensor)
        return self._total is not None and total is not None and bool((total != self._total).item())


class Unreached:
    """The parameters without a gradient, by optimizer."""

    def __init__(self) -> None:
        self.cuts = GraphCuts()
        self.missing: list[Missing] = []
        self.thawed: set[int] = set()  # identities of those that are to be trained only from some step on
        self.steps = 0
        self.over = False  # judged
        self.held: list[Any] = []  # findings that the end of the run may still refute
        self.has_backward = False  # some loss went backward since cuts are watched; without any, nothing is cut off
        self.has_whole = False  # the parameters without a gradient are all those of some optimizer
        self._seen: set[int] = set()
        self._lacking: set[int] = set()  # identities of the optimizers that have such parameters
        self._is_lacking = False  # the optimizer whose step is under way is one of them
        self._turns = 0  # of any optimizer, since cuts are watched
        self._undecided: weakref.ref[Any] | None = (
            None  # the optimizer of a step with a closure, which may make gradients or do nothing
        )

    @property
    def is_open(self) -> bool:
        """Whether some parameters have no gradient, and nothing was said of them yet."""
        return bool(self.missing) and (not self.over or bool(self.held))

    def knows(self, optimizer: Any) -> bool:
        return self.over or id(optimizer) in self._seen

    def step_begins(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """A step begins; with a closure, its forward pass is still to come, and the gradients are old."""
        self._undecided = None
        self._turns += self.cuts.armed
        self._is_lacking = id(optimizer) in self._lacking
        if not has_closure and self._is_watched_turn():
            self.cuts.disarm()
        elif self.cuts.armed and not self._is_lacking:
            self.cuts.turn_ended()
        if self.held and not all(map(_is_missing, self.missing)):
            self.held.clear()  # their turn has come
        if self.over:
            return
        if id(optimizer) not in self._seen:
            has_gradients = any(tensor.grad is not None for tensor in parameters_of(optimizer))
            if has_gradients or not has_closure:
                self._note(optimizer, has_gradients=has_gradients)
            else:
                self._undecided = weakref.ref(optimizer)
        if self.missing:
            self.steps += 1
            self.missing = [found for found in self.missing if _is_missing(found)]

    def _note(self, optimizer: Any, *, has_gradients: bool) -> None:
        self._seen.add(id(optimizer))
        self.has_whole |= not has_gradients
        lacking = [
            Missing(tensor)
            for tensor in parameters_of(optimizer)
            if tensor.requires_grad and tensor.grad is None and not tensor.is_inference()
        ]
        self._lacking |= {id(optimizer)} if lacking else set()
        self.missing += lacking

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Forget the parameters that a loss reaches: their gradients are only cleared too early."""
        self.has_backward = True
        reached = {id(leaf) for leaf in leaves_behind(roots)} if self.has_whole and self.cuts.armed else set()
        self.missing = [found for found in self.missing if id(found.reference()) not in reached]

    def step_ended(self) -> None:
        optimizer, self._undecided = self._undecided() if self._undecided is not None else None, None
        if optimizer is not None and all(tensor.grad is None for tensor in parameters_of(optimizer)):
            self._note(optimizer, has_gradients=False)  # the closure did nothing, as in Lightning's manual optimization
        if self.cuts.armed:
            if self._is_watched_turn():
                self.cuts.disarm()  # a closure has run the forward pass
        elif self.missing and not self.over:
            self.cuts.arm([tensor for found in self.missing if (tensor := found.reference()) is not None])

    def _is_watched_turn(self) -> bool:
        """Whether the step is that of an optimizer with such parameters: others may step in between."""
        return self._is_lacking or self._turns >= _MAX_TURNS

    def is_due(self, *, at_end: bool = False) -> bool:
        """Whether there is enough to be judged; once, and again at the end where it was not sure."""
        if at_end and self.held:
            return True
        wanted = _MIN_STEPS_AT_END if at_end else _MIN_STEPS_OF_WHOLE if self.has_whole else _MIN_STEPS
        if self.over or not self.missing or not self.has_backward or self.steps < wanted:
            return False
        self.over = True
        return True


def _is_missing(found: Missing) -> bool:
    tensor = found.reference()
    return tensor is not None and tensor.grad is None and tensor.requires_grad


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta else 0


def _total(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    with torch.no_grad():
        return tensor.detach().sum(dtype=torch.float64) if tensor.is_floating_point() else None
