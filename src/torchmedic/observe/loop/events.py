"""What the ledger of a loop is made of: events with their places, optimizers, batches, norms of cleared gradients.

Norms are measured only in loops that clear gradients after backward and before the update, and only in a few cycles.
They stay on the device until somebody asks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchmedic.observe.loop.batch_looks import NO_LOOK, BatchLook
from torchmedic.observe.loop.overwrites import Overwrites
from torchmedic.observe.loop.picture_looks import CutPictures
from torchmedic.observe.loop.witness import State, Witness, witness_of
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.graph import walk
from torchmedic.source.spots import Place

_MAX_CYCLES = 3
_MAX_ELEMENTS = 1 << 22  # that are copied
_MAX_COPIES = 48


class Event(NamedTuple):
    """One thing that the loop did.

    `who` is the number of the optimizer, scheduler or module that it was done to. `site` tells calls apart, in the
    user's code or in a library's. `states` holds the witness of every optimizer, by its number.
    """

    kind: str
    who: int
    site: int
    place: Place
    states: dict[int, State]
    step: int
    fact: Any = None


class Watched:
    """An optimizer that was seen to be built or to step."""

    def __init__(self, optimizer: Any, number: int, built: Place | None) -> None:
        self.reference = weakref.ref(optimizer)
        self.number = number
        self.built = built
        self.caller: Place | None = None  # of the function that built it
        self.loaded: Place | None = None  # where it was given the state of another one
        self.witness: Witness | None = None
        self.searched = 0
        self.thrown_away = ThrownAway()
        self.overwrites = Overwrites()
        self.used: State | None = None  # the state of the witness when it was last updated

    @property
    def optimizer(self) -> Any:
        """The optimizer; None once it is gone, and while another thread still constructs it."""
        optimizer = self.reference()
        return optimizer if hasattr(optimizer, "param_groups") else None

    @property
    def parameters(self) -> list[torch.Tensor]:
        optimizer = self.optimizer
        return parameters_of(optimizer) if optimizer is not None else []

    def find_witness(self) -> None:
        optimizer = self.optimizer
        if optimizer is not None and self.searched <= 16:
            self.searched += 1
            self.witness = witness_of(optimizer)

    def is_used_gradient(self) -> bool:
        """Whether the gradients that the last update used are still in place."""
        used, witness = self.used, self.witness
        return used is not None and witness is not None and witness.look().gradient == used.gradient

    def norm(self, *, wait: bool) -> float | None:
        return self.witness.norm(wait=wait) if self.witness is not None else None


class Fetched(NamedTuple):
    """A batch that was fetched: its number in its pass, what it is made of, and how many the pass has.

    `in_order` is the size of a batch where the items come in the order of the dataset. `cut` tells of pictures in it.
    """

    position: int
    items: int | None
    dataset: int
    length: int | None
    in_order: int | None
    workers: int  # that nobody sets up
    direct: bool  # a loop of the user's takes it
    look: BatchLook = NO_LOOK
    drawn: int = 0  # items of a batch that were drawn at random, at the beginning of a pass
    cut: CutPictures | None = None


class BackwardFact(NamedTuple):
    """A call of backward: whether a step called it (a closure), norms of the witnesses before it, by optimizer.

    `nearest` is the number of the optimizer whose weights are the nearest to the loss; 0 where nobody has looked.
    """

    inside_step: bool
    norms: dict[int, float | None]
    is_mean: bool  # the loss is a mean that nothing was done to afterwards
    targets: frozenset[int] = frozenset()  # of the loss, where the labels of the batch are asked for
    nearest: int = 0


def nearest_owner(roots: Iterable[Any], optimizers: Iterable[Watched]) -> int:
    """The number of the optimizer that has the weights which are the nearest to a loss; 0 where it has no choice."""
    owners = {id(tensor): watched.number for watched in optimizers for tensor in watched.parameters}
    if len(set(owners.values())) < 2:
        return 0
    nodes = walk((root.grad_fn for root in roots if isinstance(root, torch.Tensor)), nearest_first=True)
    return next((owner for node in nodes if (owner := owners.get(id(getattr(node, "variable", None))))), 0)


class StepFact(NamedTuple):
    """An update. `is_fresh`: the optimizer keeps moving averages and has none yet. `first` is its first tensor."""

    has_gradient: bool
    rates: tuple[float | None, ...]
    whose: Watched
    is_fresh: bool
    first: weakref.ref[torch.Tensor] | None


def step_fact(optimizer: Any, watched: Watched) -> StepFact:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    settings = optimizer.defaults
    is_fresh = not optimizer.state and bool("betas" in settings or settings.get("momentum"))
    has_gradient = any(tensor.grad is not None for tensor in tensors)
    first = weakref.ref(tensors[0]) if tensors else None
    return StepFact(has_gradient, rates(optimizer), watched, is_fresh, first)


class ScheduleFact(NamedTuple):
    """A move of a schedule: the number of its optimizer, whether an epoch was given, the rates before the move.

    `epoch` is the one at which the schedule was before; NaN where that is a tensor.
    """

    optimizer: int
    is_explicit: bool
    rates: tuple[float | None, ...]
    epoch: float = 0.0


class ForwardFact(NamedTuple):
    training: bool
    with_gradients: bool


class EmptiedFact(NamedTuple):
    """A call of `empty_cache`, in seconds."""

    began: float
    took: float


def is_mean(node: Any) -> bool:
    """Whether the loss is a mean over several values, with nothing done to it afterwards."""
    name = type(node).__name__
    if name == "MeanBackward0":
        return bool(getattr(node, "_saved_self_numel", 0) > 1)
    return name.startswith(("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss")) and node._saved_reduction == 1


def epoch_of(schedule: Any) -> float:
    """Where a schedule stands; NaN where that is no number of Python's."""
    epoch = getattr(schedule, "last_epoch", 0.0)
    return float(epoch) if isinstance(epoch, float | int) else float("nan")


def rates(optimizer: Any) -> tuple[float | None, ...]:
    """The learning rates of all groups; None for one that is kept in a tensor, which may be on a device."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(float(rate) if isinstance(rate, float | int) else None for rate in rates)


def are_numbers(indices: list[Any] | tuple[Any, ...]) -> bool:
    return bool(indices) and all(type(index) is int for index in indices)


class ThrownAway:
    """The gradients of one optimizer that were cleared before it used them."""

    def __init__(self) -> None:
        self._backwards = 0
        self._sums: list[torch.Tensor] = []
        self._cycles = 0
        self._copies = 0
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None

    def backward(self) -> None:
        self._backwards += 1

    def clearing(self, optimizer: Any) -> None:
        """Gradients are about to be cleared."""
        if not self._backwards or self._cycles >= _MAX_CYCLES or self._copies >= _MAX_COPIES:
            return
        gradients = _gradients(optimizer)
        self._backwards = 0
        if not gradients:
            return
        self._copies += 1
        if _are_of_same(self._sums, gradients):
            self._sums = [a + b for a, b in zip(self._sums, gradients, strict=True)]
        else:
            self._sums = [gradient.clone() for gradient in gradients]

    def step(self, optimizer: Any) -> None:
        """An update begins with what is left."""
        self._backwards = 0
        gradients, lost = _gradients(optimizer) if self._sums else [], self._sums
        self._sums = []
        if lost and _are_of_same(lost, gradients):
            self._cycles += 1
            whole = [a + b for a, b in zip(lost, gradients, strict=True)]
            self._norms = (_norm(gradients), _norm(whole))

    def norms(self) -> tuple[float, float] | None:
        """Norms of the gradients that the last update used, and of all that there were; waits for the device."""
        return None if self._norms is None else (float(self._norms[0].item()), float(self._norms[1].item()))


def _are_of_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists of gradients can be those of the same parameters."""
    return [each.shape for each in some] == [each.shape for each in others]


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """All gradients, or none where they are too large to be copied or are not plain tensors."""
    found = [tensor.grad.detach() for tensor in parameters_of(optimizer) if tensor.grad is not None]
    is_plain = all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in found)
    if any(gradient.is_cuda for gradient in found) and torch.cuda.is_current_stream_capturing():
        return []  # copies would become part of the user's graph
    return found if is_plain and sum(gradient.numel() for gradient in found) <= _MAX_ELEMENTS else []


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    where = tensors[0].device
    norms = [torch.linalg.vector_norm(tensor).to(where, torch.float32) for tensor in tensors]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
