"""Where tensors leave the graph, watched for one step of a run in which some parameters get no gradient.

`detach`, `.data`, `numpy` and their like build no node, so for that one step these methods, `nn.Parameter` and `sample`
of distributions note the caller and the parameters behind the tensor; and a global module hook notes which layers are
called, from where, and which of those results they are given. A number that `item` read counts as a cut only once a new
tensor is made of it: most are read for a log.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.modules import module as nn_module

from torchmedic.contained import contained
from torchmedic.observe.checkup.callers import from_line_of, sites_of
from torchmedic.observe.checkup.node_births import LOSSES, Site
from torchmedic.observe.exchanged import Exchanged
from torchmedic.source.objects.graph import leaves_behind
from torchmedic.source.user_code import is_user_file

_METHODS = ("detach", "detach_", "numpy", "tolist", "argmax", "item", "__float__")
_MAKERS = ("tensor", "as_tensor")
COMPARING = ("__gt__", "__ge__", "__lt__", "__le__")
SELECTING = (*COMPARING, "topk", "sort", "argsort", "argmin", "multinomial", "bernoulli")  # positions, or 0 and 1
_CALL_MODULE = torch.nn.Module._call_impl.__code__
_HOOK = -7002  # keys of torch's own count up from 0
_MAX_NODES = 20_000  # of one graph
_MAX_CUTS = 200
_MAX_LOSSES = 64  # that are noted
_MAX_NUMBERS = 4096  # that are read in one step, or given to a new tensor


class Cut:
    """One call that gave back a tensor, or numbers, without the graph of what it was given."""

    def __init__(self, name: str, sites: tuple[Site, ...], behind: frozenset[int]) -> None:
        self.name = name
        self.sites = sites
        self.behind = behind  # identities of the watched parameters
        self.fed = False  # to a layer, as it is
        self.entered: tuple[Site, ...] = ()  # for a number that was read: where a tensor was made of it
        self.result: weakref.ref[torch.Tensor] | None = None
        self.drawn_from: weakref.ref[Any] | None = None  # for a sample: the distribution
        self.is_scored = False  # `log_prob` of that distribution was asked: gradients go that way
        self.is_of_other_turn = False  # noted before another optimizer stepped
        self.sequence = 0  # of the node that was cut off


class Called(NamedTuple):
    """The first call of a module in that step; the first one with gradients, if there is one."""

    module: weakref.ref[torch.nn.Module]
    with_gradient: bool
    sites: tuple[Site, ...]
    once: bool  # there was no other with gradients


class _Ungraded(NamedTuple):
    """A tensor that was computed without gradients, and the identities of the modules that computed it."""

    result: weakref.ref[torch.Tensor]
    modules: frozenset[int]


class GraphCuts:
    """Notes who cuts some parameters off, while it is armed."""

    _counts_reads = False  # whether a number that was read is a cut even if no tensor is made of it

    def __init__(self) -> None:
        self.armed = False
        self.done = False
        self.cuts: list[Cut] = []
        self.losses: list[Cut] = []  # calls of loss functions that the watched parameters have a part in
        self._called: dict[int, Called] = {}
        self._ungraded: dict[int, _Ungraded] = {}  # results that were computed without gradients, by identity
        self._flows: list[tuple[frozenset[int], int]] = []  # of such results: from modules to the next one
        self._feeding: set[int] = set()  # modules whose such result a trained layer was given
        self._numbers: dict[int, tuple[float, Cut]] = {}  # that were read, by identity
        self._watched: frozenset[int] | None = frozenset()  # identities of parameters; None: all
        self._patches = Exchanged()

    def arm(self, parameters: list[torch.Tensor] | None) -> None:
        """Begin to note who cuts these parameters off; None for any."""
        if self.armed or self.done:
            return
        self.armed = True
        self._watched = None if parameters is None else frozenset(map(id, parameters))
        put = self._patches.put
        for name in _METHODS:
            put(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        if parameters is not None:
            for name in SELECTING:
                put(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
            for name in (*SELECTING[len(COMPARING) :], "argmax"):
                put(torch, name, self._noting(name, getattr(torch, name)))
            for name in LOSSES:
                put(functional, name, self._comparing(name, getattr(functional, name)))
        for name in _MAKERS:
            put(torch, name, self._making(f"torch.{name}", getattr(torch, name)))
        made = self._making("nn.Parameter", torch.nn.Parameter.__new__, 1)
        put(torch.nn.Parameter, "__new__", staticmethod(made))
        for name, wrap in (("sample", self._sampling), ("log_prob", self._scoring)):
            for kind in _distributions(name):
                put(kind, name, wrap(getattr(kind, name)))
        data: Any = torch.Tensor.data
        put(torch.Tensor, "data", property(self._noting("data", data.__get__), data.__set__))
        nn_module._global_forward_pre_hooks[_HOOK] = contained("observe.checkup")(self._module_called)
        if parameters is not None:
            nn_module._global_forward_hooks[_HOOK] = contained("observe.checkup")(self._module_returned)

    def disarm(self) -> None:
        if not self.armed:
            return
        self.armed, self.done = False, True
        self._numbers.clear()
        self._ungraded.clear()
        nn_module._global_forward_pre_hooks.pop(_HOOK, None)
        nn_module._global_forward_hooks.pop(_HOOK, None)
        self._patches.take_back()

    def turn_ended(self) -> None:
        """An optimizer steps that has all its gradients: what was noted so far belongs to its step."""
        for cut in (*self.cuts, *self.losses):
            cut.is_of_other_turn = True

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules that were called in that step."""
        return [module for called in self._called.values() if (module := called.module()) is not None]

    def call_of(self, module: torch.nn.Module) -> Called | None:
        called = self._called.get(id(module))
        return called if called is not None and called.module() is module else None

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.checkup")(self._note)
        note_parameter = contained("observe.checkup")(self._note_parameter)

        @functools.wraps(original)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = from_line_of(sys._getframe(1), original, (tensor, *args), kwargs)
            if isinstance(tensor, torch.Tensor) and len(self.cuts) < _MAX_CUTS:
                if tensor.grad_fn is not None:
                    note(name, tensor, result, sys._getframe(1))
                elif self._watched is not None and id(tensor) in self._watched and _is_forward(sys._getframe(1)):
                    note_parameter(name, tensor, sys._getframe(1))
            return result

        return call

    def _note(self, name: str, tensor: torch.Tensor, result: Any, frame: FrameType) -> Cut | None:
        behind = self._behind(tensor)
        if not behind:
            return None
        cut = Cut(name, sites_of(frame), behind)
        cut.sequence = _sequence_of(tensor)
        cut.result = weakref.ref(result) if isinstance(result, torch.Tensor) else None
        if not isinstance(result, float) or self._counts_reads:
            self.cuts.append(cut)
        if isinstance(result, float) and len(self._numbers) < _MAX_NUMBERS:
            self._numbers[id(result)] = (result, cut)
        return cut

    def _comparing(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.checkup")(self._note_loss_of)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = from_line_of(sys._getframe(1), original, args, kwargs)
            if isinstance(result, torch.Tensor) and result.grad_fn is not None and len(self.losses) < _MAX_LOSSES:
                note(name, result, sys._getframe(1))
            return result

        return call

    def _note_loss_of(self, name: str, result: torch.Tensor, frame: FrameType) -> None:
        if behind := self._behind(result):
            loss = Cut(name, sites_of(frame), behind)
            loss.sequence = _sequence_of(result)
            self.losses.append(loss)

    def _note_parameter(self, name: str, tensor: torch.Tensor, frame: FrameType) -> None:
        """The forward pass of a model reads the values of a parameter without a graph."""
        cut = Cut(name, sites_of(frame), frozenset({id(tensor)}))
        cut.fed = True
        self.cuts.append(cut)

    def _sampling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.checkup")(self._note)

        @functools.wraps(original)
        def sample(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            result = from_line_of(sys._getframe(1), original, (distribution, *args), kwargs)
            tensors = [value for value in vars(distribution).values() if isinstance(value, torch.Tensor)]
            given = [tensor for tensor in tensors if tensor.grad_fn is not None]
            if given and distribution.has_rsample and isinstance(result, torch.Tensor) and len(self.cuts) < _MAX_CUTS:
                cut = note("sample", given[0], result, sys._getframe(1))
                if cut is not None:
                    cut.drawn_from = weakref.ref(distribution)
            return result

        return sample

    def _scoring(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log_prob(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            for cut in self.cuts:
                cut.is_scored |= cut.drawn_from is not None and cut.drawn_from() is distribution
            return from_line_of(sys._getframe(1), original, (distribution, *args), kwargs)

        return log_prob

    def _making(self, name: str, original: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
        enter = contained("observe.checkup")(self._enter)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            result = from_line_of(sys._getframe(1), original, args, kwargs)
            if len(args) > position and len(self.cuts) < _MAX_CUTS:
                enter(name, args[position], result, sys._getframe(1))
            return result

        return make

    def _enter(self, name: str, given: Any, result: Any, frame: FrameType) -> None:
        """A tensor was made: of another tensor, or of numbers, some of which were perhaps read from tensors."""
        if isinstance(given, torch.Tensor):
            if given.grad_fn is not None and result.grad_fn is None:
                self._note(name, given, result, frame)
            elif self._watched is not None and id(given) in self._watched and _is_forward(frame):
                self._note_parameter(name, given, frame)
            return
        for number in _numbers_in(given):
            value, cut = self._numbers.get(id(number), (None, None))
            if value is number and cut is not None and not cut.entered:
                cut.entered = sites_of(frame)
                if not any(other.sites == cut.sites for other in self.cuts):
                    self.cuts.append(cut)

    def _behind(self, tensor: torch.Tensor) -> frozenset[int]:
        watched = self._watched
        leaves = leaves_behind([tensor], _MAX_NODES)
        return frozenset(id(leaf) for leaf in leaves if watched is None or id(leaf) in watched)

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            called = self._called.get(id(module))
            with_gradient = torch.is_grad_enabled()
            if called is None or (with_gradient and not called.with_gradient):
                called = Called(weakref.ref(module), with_gradient, sites_of(sys._getframe(1)), once=True)
            elif with_gradient:
                called = called._replace(once=False)
            self._called[id(module)] = called
            given = {id(argument): argument for argument in args if isinstance(argument, torch.Tensor)}
            for known in [self._ungraded[key] for key in given if key in self._ungraded]:
                if known.result() is None:
                    continue
                if not with_gradient:
                    self._flows.append((known.modules, id(module)))
                elif self._watched is not None and self._watched.isdisjoint(map(id, module.parameters())):
                    self._feeding |= known.modules
            for cut in self.cuts:
                cut.fed |= cut.result is not None and id(cut.result()) in given

    def _module_returned(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not isinstance(result, torch.Tensor) or torch.compiler.is_compiling() or len(self._ungraded) >= _MAX_CUTS:
            return
        known, parts = self._ungraded.get(id(result)), set(map(id, module.modules()))
        if torch.is_grad_enabled():  # inside of the module, something may have been called without gradients
            parts = {part for part in parts if (called := self._called.get(part)) and not called.with_gradient}
        parts |= known.modules if known is not None and known.result() is result else frozenset()
        if parts and not (torch.is_grad_enabled() and result.requires_grad):
            self._ungraded[id(result)] = _Ungraded(weakref.ref(result), frozenset(parts))

    def feeds_trained(self, module: torch.nn.Module) -> bool:
        """Whether trained layers are given what a module computes without gradients."""
        feeding = set(self._feeding)
        for modules, following in reversed(self._flows):
            feeding |= modules if following in feeding else frozenset()
        return id(module) in feeding


def _sequence_of(tensor: torch.Tensor) -> int:
    return int(tensor.grad_fn._sequence_nr()) if tensor.grad_fn is not None else 0


def _is_forward(frame: FrameType) -> bool:
    """Whether a frame is the user's own, in the forward pass of a module: elsewhere values are read for a copy."""
    if not is_user_file(frame.f_code.co_filename):
        return False
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not _CALL_MODULE:
        outer = outer.f_back
    return outer is not None


def _distributions(method: str) -> list[Any]:
    """The distributions that have a method of their own."""
    found: list[Any] = [torch.distributions.Distribution]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in dict.fromkeys(found) if method in vars(kind)]


def _numbers_in(given: Any) -> list[float]:
    given = [given] if isinstance(given, float) else given
    if not isinstance(given, list | tuple) or not given:
        return []
    rows = [row for row in given[:64] if isinstance(row, list | tuple)] or [given]
    return [number for row in rows for number in row[:_MAX_NUMBERS] if type(number) is float]
