"""Which parameters the loss reaches, read off the graph before backward frees it. Asked of a few steps only.

A layer whose weight no optimizer has is remembered with a sample of its values, and with its place in the graph:
whether gradients of layers that are trained pass through it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchmedic.source.objects.graph import following, name_of, saved_by, walk

_MAX_NODES = 20000  # of one graph
_MAX_SAMPLE = 1024  # values of a weight
_MAX_LAYERS = 64  # without an optimizer, whose place in the graph is looked for
_MAX_TERMS = 32  # of a loss
_LAYERS = ("AddmmBackward", "MmBackward", "ConvolutionBackward")
# Of these the node saves what it was given.
_GIVEN = {"AddmmBackward": "mat1", "MmBackward": "self", "ConvolutionBackward": "input"}


class Reached(NamedTuple):
    """A parameter that some loss reached, how often it had been written to then, and in which step that was."""

    reference: weakref.ref[torch.Tensor]
    writes: int
    step: int
    shape: torch.Size


class Ownerless:
    """The weight of a layer that was in no optimizer when a loss reached it, and what it was like."""

    def __init__(self, tensor: torch.Tensor, step: int, *, is_between: bool, is_alone: bool = False) -> None:
        self.reference = weakref.ref(tensor)
        self.step = step
        self.is_between = is_between  # the gradient of a layer that an optimizer has passes through this layer
        self.is_alone = is_alone  # it is reached by a term of the loss that reaches nothing that an optimizer has
        self.gives_back = False  # its result is compared with the data that the model was given
        self.classifies = False  # its result is compared with labels
        self.is_foreign = False  # the loss reaches nothing that an optimizer has
        self._writes = tensor._version
        self._sample = _sample(tensor)

    def is_written(self) -> bool:
        """Whether anybody has changed the values, also through `.data`. Waits for the device."""
        tensor = self.reference()
        if tensor is None or tensor._version != self._writes or tensor.device != self._sample.device:
            return True
        return not torch.equal(_sample(tensor), self._sample)


class Reach:
    """Parameters by their identity.

    Args:
        since: Updates before the first graph that is walked.
    """

    def __init__(self, since: int = 0) -> None:
        self.since = since
        self.found: dict[int, Reached] = {}
        self.complete = True  # no graph was too large to be walked to its end
        self.walks = 0
        self.ownerless: dict[int, Ownerless] = {}
        self.bare: dict[int, Ownerless] = {}  # parameters that are not weights of layers, in no optimizer either
        self.plain: dict[int, Ownerless] = {}  # leaves that are no parameters and no inputs of layers, the same way
        self.weights: dict[int, Ownerless] = {}  # of layers, where optimizers have none of them
        self._gone: list[Ownerless] = []  # whose identity another parameter has now
        self.reached_owned = False  # some loss reached a tensor that an optimizer had
        self.reached_data = False  # some loss reached a leaf that is no parameter, as an input of an attack
        self.new_leaves: list[int] = []  # by walk: leaves that no optimizer had; 0 where one of them was known before
        self._leaves: list[weakref.ref[torch.Tensor]] = []

    def walk(self, roots: Iterable[Any], step: int, owned: set[int]) -> None:
        """Walk the graph of a loss.

        Args:
            roots: What backward is called on.
            step: Updates so far.
            owned: Identities of the parameters that optimizers have.
        """
        self.walks += 1
        seen: set[Any] = set()
        starts = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
        lost: set[int] = set()
        leaves: list[torch.Tensor] = []
        for node in walk(starts, seen, _MAX_NODES):
            leaf = getattr(node, "variable", None)
            if leaf is None:
                continue
            leaves.append(leaf)
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in self.found:
                self.found[id(leaf)] = Reached(weakref.ref(leaf), leaf._version, step, leaf.shape)
            self._forget_namesake(leaf)
            if id(leaf) not in owned and not any(id(leaf) in known for known in self._known):
                lost.add(id(leaf))
        self.complete &= len(seen) < _MAX_NODES
        self._note_leaves(leaves, owned)
        if lost and owned:
            is_foreign = not any(id(leaf) in owned for leaf in leaves)
            self._remember(starts, lost, owned, step, is_foreign=is_foreign)

    @property
    def _known(self) -> tuple[dict[int, Ownerless], ...]:
        return self.ownerless, self.bare, self.plain, self.weights

    def _forget_namesake(self, leaf: torch.Tensor) -> None:
        for known in self._known:
            if id(leaf) in known and known[id(leaf)].reference() is not leaf:
                self._gone.append(known.pop(id(leaf)))

    def short_lived(self) -> list[Ownerless]:
        """Parameters behind trained layers that no optimizer had and that are gone: they were made for one step."""
        known = [*self._gone, *self.ownerless.values(), *self.bare.values()]
        return [each for each in known if each.is_between and each.reference() is None]

    def _note_leaves(self, leaves: list[torch.Tensor], owned: set[int]) -> None:
        self.reached_owned = self.reached_owned or any(id(leaf) in owned for leaf in leaves)
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]
        self.reached_data = self.reached_data or any(id(leaf) not in owned for leaf in others)
        if self.reached_owned:
            return
        known = {id(leaf) for reference in self._leaves if (leaf := reference()) is not None}
        self.new_leaves.append(0 if any(id(leaf) in known for leaf in leaves) else len(leaves))
        self._leaves += [weakref.ref(leaf) for leaf in leaves]

    def _remember(self, starts: list[Any], lost: set[int], owned: set[int], step: int, *, is_foreign: bool) -> None:
        """Take down the layers without an optimizer, and which of them stand between a trained layer and the loss."""
        layers = [(node, weights) for node in walk(starts, most=_MAX_NODES) if (weights := _weights(node))]
        trained = {node for node, weights in layers if any(id(weight) in owned for weight in weights)}
        without = [(node, weight) for node, weights in layers for weight in weights if id(weight) in lost]
        if len(without) > _MAX_LAYERS:
            return
        if not (is_foreign or trained):  # an optimizer has biases only, or what the layers are given
            known = [weight for _, weight in without if _is_readable(weight)]
            self.weights |= {id(weight): Ownerless(weight, step, is_between=False) for weight in known}
            return
        if is_foreign:  # a loss for a network that no optimizer has, as for the second of two critics
            known = [weight for _, weight in without if _is_readable(weight)]
            found = {id(weight): Ownerless(weight, step, is_between=False) for weight in known}
            for each in found.values():
                each.is_foreign = True
            self.ownerless |= found
            return
        bare = lost - {id(weight) for _, weight in without}
        if 0 < len(bare) <= _MAX_LAYERS:
            for leaf in _meeting(starts, bare, trained):
                is_parameter = isinstance(leaf, torch.nn.Parameter)
                (self.bare if is_parameter else self.plain)[id(leaf)] = Ownerless(leaf, step, is_between=is_parameter)
        giving_back, classifying = _giving_back(starts), _classifying(starts)
        nearest = _nearest(starts, trained)
        alone = {node for term in _terms(starts) if (behind := _without_owner(term, owned)) for node in behind}
        for node, weight in without:
            if id(weight) not in self.ownerless and _is_readable(weight):
                is_between = node in nearest and any(behind in trained for behind in walk([node], most=_MAX_NODES))
                one = Ownerless(weight, step, is_between=is_between, is_alone=node in alone)
                one.gives_back, one.classifies = node in giving_back, node in classifying
                self.ownerless[id(weight)] = one

    def living(self) -> list[tuple[torch.Tensor, Reached]]:
        """Parameters that were reached and still live."""
        known = ((reached.reference(), reached) for reached in self.found.values())
        return [(tensor, reached) for tensor, reached in known if tensor is not None]


def _weights(node: Any) -> list[torch.Tensor]:
    """The weights of a layer, where a node is the operation of one."""
    if not name_of(node).startswith(_LAYERS):
        return []
    found: list[torch.Tensor] = []
    for behind in following(node):
        after = following(behind) if name_of(behind).startswith("TBackward") else []
        leaf = getattr(after[0] if len(after) == 1 else behind, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and leaf.dim() > 1:
            found.append(leaf)
    return found


def _giving_back(starts: list[Any]) -> set[Any]:
    """The last layers before a loss function whose target is the very data that a first layer was given."""
    given: set[tuple[int, int]] = set()
    losses: list[tuple[Any, tuple[int, int]]] = []
    with contextlib.suppress(RuntimeError):  # overwritten since, which backward itself will complain of
        for node in walk(starts, most=_MAX_NODES):
            kind = node.name().rstrip("0123456789")
            data = saved_by(node, _GIVEN[kind]) if kind in _GIVEN else None
            target = saved_by(node, "target")
            if type(data) is torch.Tensor and data.grad_fn is None:
                given.add((data.data_ptr(), data.numel()))
            if type(target) is torch.Tensor:
                losses.append((node, (target.data_ptr(), target.numel())))
    return _last_layers([node for node, target in losses if target in given])


def _classifying(starts: list[Any]) -> set[Any]:
    """The last layers before a loss function whose targets are labels."""
    return _last_layers([node for node in walk(starts, most=_MAX_NODES) if name_of(node).startswith("NllLoss")])


def _last_layers(pending: list[Any]) -> set[Any]:
    """The layers that nodes lead to, without another layer in between."""
    found: set[Any] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += following(node) if not node.name().startswith(_LAYERS) else []
    return {node for node in found if node.name().startswith(_LAYERS)}


def _meeting(starts: list[Any], wanted: set[int], trained: set[Any]) -> list[torch.Tensor]:
    """The wanted leaves that an operation combines with the result of a trained layer. A sum of losses is none.

    A leaf that is no parameter and that a trained layer is given as well is data.
    """
    reached: dict[Any, frozenset[Any]] = {}  # by node: the wanted leaves behind it, and None if a trained layer is
    found: dict[int, torch.Tensor] = {}
    data: set[int] = set()
    pending = [(start, False) for start in starts if start is not None]
    while pending:
        node, is_ready = pending.pop()
        if node in reached:
            continue
        if not is_ready:
            pending += [(node, True), *((behind, False) for behind in following(node) if behind not in reached)]
            continue
        leaf = getattr(node, "variable", None)
        behind = [reached.get(each, frozenset()) for each in following(node)]
        here = frozenset[Any]().union(*behind)
        if id(leaf) in wanted:
            here |= {node}
        if None in here and not _adds_losses(node):
            alone = (each for part in behind if None not in part for each in part)
            found |= {id(each.variable): each.variable for each in alone}
        if node in trained:
            data |= {id(each.variable) for each in here if each is not None}
        reached[node] = here | {None} if node in trained else here
    return [leaf for leaf in found.values() if isinstance(leaf, torch.nn.Parameter) or id(leaf) not in data]


def _adds_losses(node: Any) -> bool:
    return bool(name_of(node).startswith(("AddBackward", "SubBackward")) and _is_number(node))


def _is_number(node: Any) -> bool:
    return all(not each.shape for each in node._input_metadata)


def _terms(starts: list[Any]) -> list[Any]:
    """The terms that a loss adds up, past constant factors."""
    found: list[Any] = []
    pending = [start for start in starts if start is not None]
    while pending and len(found) < _MAX_TERMS:
        node = pending.pop()
        is_scaled = name_of(node).startswith(("MulBackward", "DivBackward")) and len(following(node)) == 1
        if _adds_losses(node) or (is_scaled and _is_number(node)):
            pending += following(node)
        else:
            found.append(node)
    return found if not pending else []


def _without_owner(term: Any, owned: set[int]) -> set[Any]:
    """The nodes of a term, if it reaches parameters and none that an optimizer has."""
    seen = set(walk([term], most=_MAX_NODES))
    leaves = [leaf for node in seen if (leaf := getattr(node, "variable", None)) is not None]
    return seen if len(seen) < _MAX_NODES and leaves and not any(id(leaf) in owned for leaf in leaves) else set()


def _nearest(starts: list[Any], trained: set[Any]) -> set[Any]:
    """The nodes that a loss comes to before any layer that is trained."""
    seen: set[Any] = set()
    pending = [start for start in starts if start is not None]
    while pending:
        node = pending.pop()
        if node not in seen and node not in trained:
            seen.add(node)
            pending.extend(following(node))
    return seen


def _is_readable(weight: torch.Tensor) -> bool:
    """Whether a weight has values to compare; a wrapper that spreads weights over ranks empties those it gathered."""
    is_usual = type(weight) is torch.nn.Parameter and not weight.is_meta
    return is_usual and weight.untyped_storage().nbytes() >= weight.nbytes


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().reshape(-1)[:_MAX_SAMPLE].clone()
