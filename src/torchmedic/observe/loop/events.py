"""What the ledger of a loop is made of: events with their places, optimizers, batches."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torchmedic.observe.loop.cleared_gradients import ThrownAway
from torchmedic.observe.loop.witness import State, Witness, witness_of
from torchmedic.source.spots import Place


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
        self.witness: Witness | None = None
        self.searched = 0
        self.thrown_away = ThrownAway()
        self.used: State | None = None  # the state of the witness when it was last updated

    @property
    def optimizer(self) -> Any:
        return self.reference()

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

    `in_order` is the size of a batch where the items come in the order of the dataset.
    """

    position: int
    items: int | None
    dataset: int
    length: int | None
    in_order: int | None
    workers: int  # that nobody sets up
    direct: bool  # the user's own code asked for it


class BackwardFact(NamedTuple):
    """A call of backward: whether a step called it (a closure), norms of the witnesses before it, by optimizer."""

    inside_step: bool
    norms: dict[int, float | None]
    is_mean: bool  # the loss is a mean that nothing was done to afterwards


class StepFact(NamedTuple):
    has_gradient: bool
    rates: tuple[float | None, ...]


class ScheduleFact(NamedTuple):
    """A move of a schedule: the number of its optimizer, whether an epoch was given, the rates before the move."""

    optimizer: int
    is_explicit: bool
    rates: tuple[float | None, ...]


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


def rates(optimizer: Any) -> tuple[float | None, ...]:
    """The learning rates of all groups; None for one that is kept in a tensor, which may be on a device."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(float(rate) if isinstance(rate, float | int) else None for rate in rates)


def are_numbers(indices: list[Any] | tuple[Any, ...]) -> bool:
    return bool(indices) and all(type(index) is int for index in indices)
