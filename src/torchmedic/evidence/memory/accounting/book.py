"""The book: every storage of one device under the first heading that fits, each counted once.

Headings in this order: parameters, buffers, gradients, optimizer state, the batch, what torchmedic itself holds, what
the graph of this step has saved, what a name of the user's holds, and what nothing leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from torchmedic.evidence.memory.accounting.holder import Found, FoundArray, FoundPile, Holder
from torchmedic.evidence.memory.accounting.saved_by_graph import (
    applied_class,
    sequence_of,
    tensors_saved_by,
    weights_before,
    weights_of,
)
from torchmedic.evidence.memory.accounting.storages import Memory, distinct, live_tensors, memory_address, memory_of
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.graph import is_counted, is_leaf, name_of, node_of, walk
from torchmedic.source.objects.living import live_modules

HEADINGS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer state",
    "the batch",
    "torchmedic",
    "saved activations",
    "held",
    "not traced",
    "arrays",
)

_MIN_TRAININGS = 4  # that are over, where their results are collected
_NOUNS = {"str": "text", "bytes": "piece of bytes", "bytearray": "piece of bytes", "int": "number", "float": "number"}


class SavedHere(NamedTuple):
    """A storage that a live node has saved."""

    memory: Memory
    node: str
    sequence: int
    shape: tuple[int, ...]
    weights: tuple[int, ...] = ()  # the identities of the parameters that the node leads to
    function: type | None = None  # of the user's, whose `apply` has made the node


class Book:
    """Storages of one device.

    Args:
        wanted: Whether a device is the one that ran out.
        optimizers: The living optimizers.
        since: The number of the first node of this step, 0 where it is not known.
    """

    def __init__(self, wanted: Callable[[torch.device], bool], optimizers: Iterable[Any], since: int) -> None:
        self._wanted = wanted
        self._optimizers = list(optimizers)
        self.since = since
        self.entries: dict[int, tuple[str, Memory]] = {}
        self._saved: dict[int, SavedHere] = {}  # by this step
        self.older: dict[int, SavedHere] = {}  # by graphs of earlier ones, whatever else holds them
        self.held: dict[int, tuple[Memory, Found]] = {}
        self.held_arrays: dict[int, tuple[Memory, Holder]] = {}
        self.piles: list[FoundPile] = []
        self.live = live_tensors()
        self.modules = live_modules()
        self._recurrent = {
            id(weight)
            for module in self.modules
            if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase)
            for weight in parts_of(module, "_parameters")
        }

    @property
    def saved(self) -> list[SavedHere]:
        """The storages that the graph of this step has saved, each with the first node that saved it."""
        return list(self._saved.values())

    def total(self, heading: str) -> int:
        return sum(memory.nbytes for under, memory in self.entries.values() if under == heading)

    @property
    def everything(self) -> int:
        return sum(memory.nbytes for _, memory in self.entries.values())

    @property
    def plain_objects(self) -> int:
        """Estimated bytes of the plain Python objects that names lead to."""
        return sum(each.pile.nbytes for each in self.piles)

    @property
    def addresses(self) -> list[int]:
        return [memory.address for _, memory in self.entries.values() if memory.address]

    def gradients_with_graph(self) -> Iterator[Found]:
        """`backward(create_graph=True)` leaves gradients that hold the graph, in a cycle with the parameters."""
        for tensor in self.live:
            gradient = tensor.grad if is_leaf(tensor) else None
            if gradient is not None and gradient.grad_fn is not None:
                yield Found(gradient, Holder(".grad", self, "", "", None, False))

    def enter(self, heading: str, tensors: Iterable[torch.Tensor]) -> None:
        for memory in distinct(tensors).values():
            if self._wanted(memory.device):
                self.entries.setdefault(memory.key, (heading, memory))

    def enter_known(
        self,
        batch: Iterable[torch.Tensor],
        ours: Iterable[torch.Tensor],
        stepping: Iterable[torch.Tensor] = (),
        collected: Iterable[torch.Tensor] = (),
        *,
        was_trained: bool = False,
    ) -> None:
        """Enter the storages that have a heading of their own.

        Args:
            batch: The batch of this step.
            ours: Tensors that torchmedic holds.
            stepping: State that an optimizer still keeps in variables of its `step`.
            collected: What lies in lists and the like: of models that nobody trains, copies that were put aside.
            was_trained: Whether there were updates of weights, by optimizers that may be gone.
        """
        kept = distinct(collected).keys()
        optimizers = self._not_kept(kept)
        trained = parameters_of(*optimizers)
        own = [each for module in self.modules for each in parts_of(module, "_parameters") if each is not None]
        self.enter("parameters", trained)
        aside = kept - self.entries.keys() if trained or was_trained else set()
        self.enter("parameters", [each for each in own if aside.isdisjoint(distinct([each]))])
        buffers = [each for module in self.modules for each in parts_of(module, "_buffers") if each is not None]
        self.enter("buffers", buffers)
        leaves = {id(each): each for each in [*own, *trained, *self.live] if is_leaf(each)}
        self.enter("gradients", [each.grad for each in leaves.values() if each.grad is not None])
        for optimizer in optimizers:
            self.enter("optimizer state", _state_of(optimizer))
        self.enter("optimizer state", stepping)
        self.enter("the batch", batch)
        self.enter("torchmedic", ours)

    def _not_kept(self, kept: AbstractSet[int]) -> list[Any]:
        """The optimizers, without those of finished trainings whose results were collected."""
        over = [
            each
            for each in self._optimizers
            if distinct(parameters_of(each)).keys() <= kept
            or ((state := distinct(_state_of(each)).keys()) and state <= kept)  # it was itself collected
        ]
        is_rest = _MIN_TRAININGS <= len(over) < len(self._optimizers)
        return (
            [each for each in self._optimizers if not any(each is one for one in over)] if is_rest else self._optimizers
        )

    def enter_graphs(self) -> None:
        """Enter what the graph of this step has saved; note beside what the graphs of earlier steps have saved."""
        seen: set[Any] = set()
        for node in walk((node_of(tensor) for tensor in self.live), seen):
            if not is_counted(node):
                continue
            sequence = sequence_of(node)
            for tensor in tensors_saved_by(node):
                for memory in memory_of(tensor):
                    under = self.entries.get(memory.key, ("",))[0]
                    if not self._wanted(memory.device) or under not in ("", "saved activations"):
                        continue
                    shape, weights = tuple(tensor.shape), self._weights_of(node)
                    entry = SavedHere(memory, name_of(node), sequence, shape, weights, applied_class(node))
                    if sequence >= self.since:
                        self.entries[memory.key] = ("saved activations", memory)
                        known = self._saved.get(memory.key)
                        if known is None or sequence < known.sequence:
                            self._saved[memory.key] = entry
                    else:
                        self.older.setdefault(memory.key, entry)

    def _weights_of(self, node: Any) -> tuple[int, ...]:
        """The weights that tell the layer of a node; inner nodes of a recurrent layer take those behind them."""
        weights = weights_of(node)
        if weights or not self._recurrent:
            return weights
        before = weights_before(node)
        return before if self._recurrent.issuperset(before) else ()

    def enter_held(self, found: Iterable[Found]) -> None:
        """Enter the storages that names of the user lead to."""
        for each in found:
            for memory in memory_of(each.tensor):
                if self._wanted(memory.device) and memory.key not in self.entries:
                    self.entries[memory.key] = ("held", memory)
                    self.held[memory.key] = (memory, each)

    def enter_older(self) -> None:
        """Enter the storages that only graphs of earlier steps keep alive."""
        for key, entry in self.older.items():
            self.entries.setdefault(key, ("held", entry.memory))

    def enter_rest(self, arrays: Iterable[FoundArray]) -> None:
        """Enter storages that no name leads to, and NumPy arrays whose memory no tensor shares."""
        self.enter("not traced", self.live)
        if not arrays:
            return
        known = {memory_address(tensor) for tensor in self.live}
        for each in arrays:
            if each.address not in known and each.nbytes:
                memory = Memory(-each.address, each.nbytes, torch.device("cpu"))
                self.entries.setdefault(memory.key, ("arrays", memory))
                self.held_arrays[memory.key] = (memory, each.holder)

    def kind_of(self, holder: Holder) -> str:
        """The noun for what a name holds: tensor, else array, else the class of its plain objects."""
        if any(_is_within(found.holder, holder) for _, found in self.held.values()):
            return "tensor"
        if any(_is_within(each, holder) for _, each in self.held_arrays.values()):
            return "array"
        kinds = {each.pile.kind for each in self.piles if _is_within(each.holder, holder)}
        return _NOUNS.get(only := kinds.pop(), only) if len(kinds) == 1 else "object" if kinds else "tensor"

    def by_holder(self) -> list[tuple[Holder, int, int]]:
        """Holder, bytes and number of storages, the biggest first."""
        sums: dict[tuple[str, str, str], tuple[Holder, int, int]] = {}
        named = [(memory, found.holder) for memory, found in self.held.values()]
        for memory, holder in [*named, *self.held_arrays.values()]:
            key = (holder.file, holder.function, holder.path)
            _, nbytes, count = sums.get(key, (holder, 0, 0))
            sums[key] = (holder, nbytes + memory.nbytes, count + 1)
        for pile, holder in self.piles:
            key = (holder.file, holder.function, holder.path)
            _, nbytes, count = sums.get(key, (holder, 0, 0))
            sums[key] = (holder, nbytes + pile.nbytes, count or pile.items)
        return sorted(sums.values(), key=lambda each: -each[1])


def _is_within(inner: Holder, outer: Holder) -> bool:
    """Whether a name is the given one, or names a part of it: `acts` and `acts[0]`."""
    same = (inner.file, inner.function) == (outer.file, outer.function)
    return same and (inner.path == outer.path or inner.path.startswith(f"{outer.path}["))


def parts_of(module: torch.nn.Module, kind: str) -> list[Any]:
    """The parameters or buffers of a module itself; none while the module is being built or copied."""
    return list(module.__dict__.get(kind, {}).values())


def _state_of(optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for state in list(getattr(optimizer, "state", {}).values()):
        for value in state.values() if isinstance(state, dict) else ():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, torch.Tensor):
                    found.append(each)
    return found
