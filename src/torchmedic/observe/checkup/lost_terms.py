"""Terms of a loss that have no graph, watched for one step of a run whose loss adds something without one.

For that step, `+` and `-` of tensors note where a number with a graph meets one without, and whatever drops a graph
(`item`, `detach`, `autograd.grad` without `create_graph`, a module that is called under `no_grad`) notes its line, and
so does a loss function that is given nothing with a graph. The rule asks whether the term without a graph comes from
such a line.
"""

from __future__ import annotations

import functools
import numbers
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.nn import functional

from torchmedic.contained import contained
from torchmedic.observe.checkup.callers import from_line_of, sites_of
from torchmedic.observe.checkup.graph_cuts import COMPARING, Cut, GraphCuts
from torchmedic.observe.checkup.node_births import LOSSES, Site
from torchmedic.source.user_code import is_user_file

_LEFT = ("__add__", "__sub__", "__iadd__", "__isub__")  # the tensor stands on the left of the operator
_RIGHT = ("__radd__", "__rsub__")
CHOOSING = (*COMPARING, "long", "int", "bool", "argsort", "argmax")  # their results have no graph
HOW = {  # what drops a graph, in words
    "autograd.grad": "`autograd.grad` without `create_graph=True`",
    "data": "`.data`",
    "__float__": "`float()`",
    "no_grad": "`no_grad`",
    **dict.fromkeys(COMPARING, "a comparison"),
}
_MAX_SUMS = 200
_MAX_CALLS = 2000
_MAX_UNRECORDED = 32  # calls of modules under `no_grad` that are noted, as a validation makes many
_MAX_BACKWARDS = 4  # calls of backward for other losses, while the loss in question is awaited


class MixedSum(NamedTuple):
    """A sum of one number with a graph and one without."""

    sites: tuple[Site, ...]
    is_right: bool  # the operand without a graph stands on the right
    position: int | None = None  # its place, where several terms are added in turn by one instruction


class LostTerms(GraphCuts):
    """Notes sums and cuts while it is armed."""

    _counts_reads = True

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[MixedSum] = []
        self.constants: list[Cut] = []  # losses of values without a graph
        self.key: tuple[str, int] | None = None  # the call of backward whose loss is watched
        self._calls: list[tuple[frozenset[int], tuple[Site, ...]]] = []  # of layers, by their parameters
        self._backwards = 0
        self._first_node = 0  # the number of the first node that can belong to the watched step
        self._unrecorded = 0  # calls of modules under `no_grad`
        self._turns: dict[tuple[CodeType, int], int] = {}  # by instruction: how many terms it has added

    def watch(self, key: tuple[str, int]) -> None:
        """Watch the next step for the loss of one call of backward."""
        if self.armed or self.done:
            return
        self.key = key
        self._first_node = int(_get_sequence_nr())
        self.arm(None)
        for name in CHOOSING[:-1]:  # the last is noted with the other methods
            self._patches.put(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        self._patches.put(torch, "argmax", self._noting("argmax", torch.argmax))
        for name in (*_LEFT, *_RIGHT):
            self._patches.put(torch.Tensor, name, self._summing(name, getattr(torch.Tensor, name)))
        for name in LOSSES:
            self._patches.put(functional, name, self._losing(name, getattr(functional, name)))

    def backward_begins(self, key: tuple[str, int]) -> bool:
        """A backward begins; whether it is that of the watched loss, and the watch is over."""
        self._backwards += 1
        if key == self.key or self._backwards > _MAX_BACKWARDS:
            self.disarm()
        return key == self.key

    def calls_of(self, parameters: frozenset[int]) -> list[tuple[Site, ...]]:
        """The calls of layers that have some of these parameters."""
        return [sites for own, sites in self._calls if own & parameters]

    def gradients_asked(self, roots: Any, asking: FrameType) -> None:
        """`autograd.grad` is called, in its own frame: without `create_graph` its result has no graph."""
        if asking.f_locals.get("create_graph"):
            return
        tensors = [root for root in roots if isinstance(root, torch.Tensor)]
        behind = frozenset[int]().union(*(self._behind(tensor) for tensor in tensors))
        if behind:
            self.cuts.append(Cut("autograd.grad", sites_of(asking), behind))

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        super()._module_called(module, args)
        if torch.is_grad_enabled() and len(self._calls) < _MAX_CALLS:
            own = frozenset(map(id, module.parameters(recurse=False)))
            self._calls += [(own, sites_of(sys._getframe(1)))] if own else []
        if torch.is_grad_enabled() or self._unrecorded >= _MAX_UNRECORDED:
            return
        sites = sites_of(sys._getframe(1))
        behind = frozenset(id(tensor) for tensor in module.parameters() if tensor.requires_grad)
        behind = behind.union(*(self._behind(given) for given in args if isinstance(given, torch.Tensor)))
        if behind and not any(cut.sites == sites for cut in self.cuts):
            self._unrecorded += 1
            self.cuts.append(Cut("no_grad", sites, behind))

    def _note(self, name: str, tensor: torch.Tensor, result: Any, frame: FrameType) -> Cut | None:
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() < self._first_node:
            return None  # a total, or a state, of an earlier step: no gradient can go there any more
        if name in CHOOSING and not torch.is_grad_enabled():
            return None  # what is computed here has no graph anyway
        is_users = is_user_file(frame.f_code.co_filename)  # a library, or torchmedic itself, may well read a value
        return super()._note(name, tensor, result, frame) if is_users else None

    def _losing(self, name: str, original: Any) -> Any:
        note = contained("observe.checkup")(self._note_loss)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = from_line_of(sys._getframe(1), original, args, kwargs)
            note(name, result, sys._getframe(1))
            return result

        return call

    def _note_loss(self, name: str, result: Any, frame: FrameType) -> None:
        is_constant = torch.is_grad_enabled() and isinstance(result, torch.Tensor) and not result.requires_grad
        if is_constant and len(self.constants) < _MAX_SUMS:
            self.constants.append(Cut(name, sites_of(frame), frozenset()))

    def _summing(self, name: str, original: Any) -> Any:
        note = contained("observe.checkup")(self._note_sum)

        def call(tensor: Any, other: Any, *args: Any) -> Any:
            if len(self.sums) < _MAX_SUMS:
                note(name, tensor, other, sys._getframe(1))
            return original(tensor, other, *args)

        call.__name__ = name
        return call

    def _note_sum(self, name: str, tensor: Any, other: Any, frame: FrameType) -> None:
        if not isinstance(other, torch.Tensor | numbers.Real) or type(tensor) is not torch.Tensor:
            return
        place = (frame.f_code, frame.f_lasti)
        if not isinstance(other, torch.Tensor) and other == 0 and name == "__radd__":
            self._turns[place] = 0
            return  # `total = 0`, to which losses are added
        turn = self._turns[place] = self._turns.get(place, 0) + 1
        has_graph = tensor.grad_fn is not None
        other_has = isinstance(other, torch.Tensor) and other.requires_grad
        if has_graph is other_has or tensor.numel() != 1 or (isinstance(other, torch.Tensor) and other.numel() != 1):
            return
        plain = other if has_graph else tensor
        if isinstance(plain, torch.Tensor) and plain.is_cpu and not plain.is_nonzero():
            return  # multiplied by zero on purpose
        is_right = has_graph is (name in _LEFT)
        # Numbers at the beginning of a sum are added up before the first tensor comes.
        position = turn if is_right else 0 if turn == 1 else None
        self.sums.append(MixedSum(sites_of(frame), is_right, position))


def gradient_call(frame: FrameType | None) -> FrameType | None:
    """The frame of `autograd.grad`, which is most often no training step but a part of one; None for a backward."""
    for _ in range(6):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == "torch.autograd":
            return frame if frame.f_code.co_name == "grad" else None
        frame = frame.f_back
    return None
