"""The graph behind a loss as it was when backward was called: what each node is, where it was built, what it lets pass.

Taken down in one walk before backward frees the graph. Values stay on their device as single numbers and are read
later, all at once. Nothing of the graph itself is kept.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from torchmedic.observe.checkup import normalisations, targets
from torchmedic.observe.checkup.dead_ends import DeadEnd, constant
from torchmedic.observe.checkup.foreign_terms import ForeignTerm
from torchmedic.observe.checkup.graph_facts import (
    factor_of,
    first_loss_expected,
    is_closed,
    is_mixed,
    largest_given,
    shape_of_factor,
    signed_kind,
)
from torchmedic.observe.checkup.lost_terms import LostTerms
from torchmedic.observe.checkup.node_births import Birth, LossCall, NodeBirths
from torchmedic.observe.checkup.token_looks import TokenLooks
from torchmedic.observe.device.async_devices import Fetch
from torchmedic.source.objects.graph import name_of

_MAX_NODES = 50_000  # of one graph
_MAX_GATES = 2000  # that are measured
# A result of these has the values of what they were given, perhaps in another shape or precision.
PASSING = frozenset(
    "ViewBackward UnsafeViewBackward ReshapeAliasBackward SqueezeBackward UnsqueezeBackward TransposeBackward "
    "PermuteBackward TBackward CloneBackward ToCopyBackward AliasBackward ExpandBackward".split()
)
_RECURRENT = ("MkldnnRnnLayerBackward", "CudnnRnnBackward")  # the first of the results is that of all steps
_AUTOCAST = ("cuda", "cpu")
_OF_NODES = ("largest", "still", "zero", "alike")  # numbers that may be on their device
_OUTDATED = "torch.cuda.amp"


class Node:
    """One node, and the nodes behind it by their numbers."""

    __slots__ = (
        *("alike", "behind", "birth", "closed", "dim", "dims", "dtype", "factor", "kind", "largest", "last_of", "leaf"),
        *("missing", "mixed", "multiplied", "number", "sequence", "shape", "still", "zero"),
    )

    def __init__(self, number: int, raw: Any) -> None:
        self.number = number
        self.kind = signed_kind(name_of(raw).rstrip("0123456789"), raw)
        self.sequence = int(raw._sequence_nr())
        self.behind: list[int] = []
        self.missing: list[int] = []  # the positions of inputs that are no part of the graph
        birth = raw.metadata.pop("traceback_", None)  # so that the user finds the node as torch made it
        self.birth: Birth | None = birth if isinstance(birth, Birth) else None
        inputs: Any = getattr(raw, "_input_metadata", ())
        has_shape = len(inputs) == 1 or (inputs and self.kind in _RECURRENT)
        self.shape: tuple[int, ...] | None = tuple(inputs[0].shape) if has_shape else None
        self.dtype: torch.dtype | None = inputs[0].dtype if len(inputs) == 1 else None
        variable = getattr(raw, "variable", None)
        self.leaf: weakref.ref[torch.Tensor] | None = None if variable is None else weakref.ref(variable)
        self.closed: Any = None  # for a gate: whether no gradient passes it; a tensor of one element until it is read
        self.dim: int | None = None
        self.last_of: int | None = None  # the dimension whose last element a node takes
        self.dims: tuple[int, ...] = ()  # of a node that changes the order of dimensions: where each comes from
        self.factor: float | None = None  # of a product with a number
        self.mixed = False  # the other factor of a product is 0, or has values below 0 and above
        self.multiplied: tuple[int, ...] = ()  # of a product: the shape of the factor that is no part of the graph
        self.alike: Any = None  # for a trained weight: whether all its units are the same; a tensor until it is read
        self.still: Any = None  # for a trained weight: whether its gradient is 0; a tensor until it is read
        self.zero: Any = None  # for a trained weight: whether it is 0, and its gradient; a tensor until it is read
        self.largest: Any = None  # of the data that a first layer was given; a tensor until it is read

    @property
    def made_by(self) -> str:
        """The method of a distribution that built the node; empty if none did."""
        return self.birth.method if self.birth is not None else ""

    def inputs(self) -> Iterator[tuple[int, int]]:
        """The nodes behind, by the positions of the inputs that they made."""
        positions = (place for place in range(len(self.behind) + len(self.missing)) if place not in self.missing)
        return zip(positions, self.behind, strict=True)


class Loss:
    """A root of the graph."""

    def __init__(self, root: torch.Tensor, node: int | None) -> None:
        self.node = node
        self.size = root.numel()
        self.identity = id(root)
        is_number = type(root) is torch.Tensor and root.numel() == 1 and root.is_floating_point() and not root.is_meta
        self.value: Any = root.detach().clone() if is_number else None


class LossGraph:
    """One call of backward."""

    def __init__(self, births: NodeBirths, roots: Sequence[Any], key: tuple[str, int], step: int) -> None:
        self.key = key  # the user's line that called backward
        self.step = step
        self.complete = True
        self.has_distributions = births.has_distributions
        self.nodes: list[Node] = []
        self.is_zero: Any = None  # whether every gradient is exactly 0, once that is known
        self.lost_terms: LostTerms | None = None  # of the same line, in a later step
        self.foreign: ForeignTerm | None = None
        self.dead_ends: dict[int, DeadEnd] = {}  # by the sequence of a node
        self.unmoved: list[torch.Tensor] | None = None  # of a step that was run again: weights with a gradient of 0
        self._numbers: dict[Any, int] = {}
        self._readers: dict[int, list[Node]] | None = None  # by the number of a node, once they are asked for
        self._measured = 0
        self._fetch: Fetch | None = None
        self._waiting: list[tuple[Any, str]] = []  # the owners and names of numbers that are on their way
        self._may_read = not births.has_hooks
        self.autocast = next((kind for kind in _AUTOCAST if torch.is_autocast_enabled(kind)), "")  # that is on
        self.is_outdated = step == 0 and any(_OUTDATED in line for line in linecache.getlines(key[0]))
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        with torch.no_grad():
            self._walk([root.grad_fn for root in tensors])
            self.roots = [Loss(root, self._numbers.get(root.grad_fn)) for root in tensors]
            self._by_sequence = {node.sequence: node for node in self.nodes}
            self.outside = targets.outside(self)  # by the identity of a loss call: targets out of range, of all
            self.tokens = TokenLooks()
            if self._may_read and self.complete:
                self.tokens.take(self, self._numbers)
            self.untrained = first_loss_expected(self, tensors) if step == 0 else None
        self._numbers.clear()

    def made(self, sequence: int | None) -> Node | None:
        """The node of a number that torch gave it."""
        return None if sequence is None else self._by_sequence.get(sequence)

    def losses(self) -> list[LossCall]:
        """The calls of loss functions that are part of this graph, each once."""
        found: dict[int, LossCall] = {}
        for node in self.nodes:
            if node.birth is not None and node.birth.loss is not None:
                found[id(node.birth.loss)] = node.birth.loss
        return list(found.values())

    def value_of(self, node: Node | None) -> Node | None:
        """The node that made a value, past those that only reshape it."""
        while node is not None and node.kind in PASSING and len(node.behind) == 1:
            node = self.nodes[node.behind[0]]
        return node

    def leaves(self) -> list[torch.Tensor]:
        return [leaf for node in self.nodes if node.leaf is not None and (leaf := node.leaf()) is not None]

    def leaves_below(self, number: int) -> list[torch.Tensor]:
        """The leaves that a node reaches."""
        found = [self.nodes[each].leaf for each in self.below(number)]
        return [leaf for reference in found if reference is not None and (leaf := reference()) is not None]

    def below(self, number: int) -> set[int]:
        """The numbers of a node and of all nodes that it reaches."""
        return self._reached([], [number])

    def leaves_reached(self, *, without: Iterable[Node]) -> list[torch.Tensor]:
        """The leaves that the loss reaches by ways that cross none of these nodes."""
        found = [self.nodes[number].leaf for number in self._reached(without)]
        return [leaf for reference in found if reference is not None and (leaf := reference()) is not None]

    def is_number(self, call: LossCall) -> bool:
        """Whether the result of a loss function is one number, and not one per element."""
        return any(each.birth is not None and each.birth.loss is call and each.shape == () for each in self.nodes)

    def gates(self) -> list[Node]:
        return [node for node in self.nodes if node.closed is not None]

    def reaches_leaf(self, *, without: Iterable[Node]) -> bool:
        """Whether there is a way from the loss to a leaf that crosses none of these nodes."""
        return any(self.nodes[number].leaf is not None for number in self._reached(without))

    def reaches(self, node: Node, *, without: Iterable[Node]) -> bool:
        return node.number in self._reached(without)

    def _reached(self, without: Iterable[Node], start: Sequence[int] | None = None) -> set[int]:
        stops = {node.number for node in without}
        seen: set[int] = set()
        pending = [root.node for root in self.roots if root.node is not None] if start is None else list(start)
        while pending:
            number = pending.pop()
            if number in seen or number in stops:
                continue
            seen.add(number)
            pending.extend(self.nodes[number].behind)
        return seen

    def is_followed_by_weights(self, node: Node) -> bool:
        """Whether what a node made goes into an operation with weights: it is inside of a model, not of a loss."""
        pending, seen = [node], {node.number}
        while pending:
            for later in self.readers(pending.pop()):
                if later.number in seen:
                    continue
                seen.add(later.number)
                if self.has_weight(later):
                    return True
                pending.append(later)
        return False

    def readers(self, node: Node) -> list[Node]:
        """The nodes that were given what a node made."""
        if self._readers is None:
            self._readers = {}
            for other in self.nodes:
                for number in other.behind:
                    self._readers.setdefault(number, []).append(other)
        return self._readers.get(node.number, [])

    def has_weight(self, node: Node) -> bool:
        """Whether a leaf goes into an operation as it is, or transposed."""
        behind = [self.nodes[number] for number in node.behind]
        behind = [self.nodes[each.behind[0]] if each.kind == "TBackward" and each.behind else each for each in behind]
        return any(each.leaf is not None for each in behind)

    def fetch(self, *, may_wait: bool) -> None:
        """Have every number that is still on its device brought to the host, at once; with the only wait, if any."""
        places: list[tuple[Any, str, Any]] = [(node, "closed", node.closed) for node in self.nodes]
        places += [(root, "value", root.value) for root in self.roots]
        places += [(node, name, getattr(node, name)) for node in self.nodes for name in _OF_NODES]
        places += [(owner, name, getattr(owner, name)) for owner, name in self.tokens.numbers()]
        places.append((self, "is_zero", self.is_zero))
        self._waiting = [(owner, name) for owner, name, value in places if isinstance(value, torch.Tensor)]
        tensors = [value for _, _, value in places if isinstance(value, torch.Tensor)]
        counts = [count for count, _ in self.outside.values() if isinstance(count, torch.Tensor)]
        self._fetch = Fetch(tensors + counts, may_wait=may_wait)

    def has_arrived(self) -> bool:
        """Whether the numbers are there; they are read then."""
        if self._fetch is None:
            return True
        if not self._fetch.has_arrived:
            return False
        values = iter(self._fetch.values())
        self._fetch = None
        for owner, name in self._waiting:
            value = next(values)
            setattr(owner, name, value if name in ("value", "largest", "share") else bool(value))
        for key, (count, size) in self.outside.items():
            if isinstance(count, torch.Tensor):
                self.outside[key] = (int(next(values)), size)
        return True

    def _walk(self, raws: list[Any]) -> None:
        pending = [raw for raw in raws if raw is not None]
        for raw in pending:
            self._take(raw)
        while pending:
            raw = pending.pop()
            node = self.nodes[self._numbers[raw]]
            for position, (later, _) in enumerate(raw.next_functions):
                if later is None:
                    node.missing.append(position)
                    node.multiplied = shape_of_factor(node.kind, raw, position) if self._may_read else ()
                    if position == 1 and self._may_read:
                        node.factor = factor_of(node.kind, raw)
                        node.mixed = node.factor is None and is_mixed(node.kind, raw)
                    continue
                if later not in self._numbers:
                    if len(self.nodes) >= _MAX_NODES:
                        self.complete = False
                        return
                    self._take(later)
                    pending.append(later)
                node.behind.append(self._numbers[later])

    def _take(self, raw: Any) -> None:
        if raw in self._numbers:
            return
        node = Node(len(self.nodes), raw)
        self._numbers[raw] = node.number
        self.nodes.append(node)
        if node.kind in ("SoftmaxBackward", "LogSoftmaxBackward") and hasattr(raw, "_saved_dim"):  # not a user's own
            node.dim = normalisations.signed(int(raw._saved_dim))
        layer = node.birth.layer() if node.birth is not None and node.birth.layer is not None else None
        if (dead := constant(node.kind, raw, layer)) is not None:
            self.dead_ends[node.sequence] = dead
        if node.kind == "SelectBackward" and normalisations.signed(int(getattr(raw, "_saved_index", 0))) == -1:
            node.last_of = normalisations.signed(int(raw._saved_dim))
        node.dims = normalisations.order_of_dims(node.kind, raw, len(node.shape or ()))
        if self._may_read and self._measured < _MAX_GATES:
            with suppress(RuntimeError):  # freed, or overwritten since, which backward itself will complain of
                node.closed = is_closed(node.kind, raw)
                node.largest = largest_given(node.kind, raw) if self.step == 0 else None
            self._measured += node.closed is not None
