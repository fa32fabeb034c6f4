"""Saved tensors that need not be saved: the call that made one is repeated when backward asks for it.

A node of the graph keeps the arguments of its call, and the operator follows from its name. An argument that a node
does not keep is looked for in the node before, or among the parameters. No recipe is believed: before the first use of
each kind, the call is made once and must give the same bits. So a wrong guess costs time, never a wrong gradient.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmedic.recovery.living_tensors import plainly
from torchmedic.recovery.operators import Operator
from torchmedic.recovery.patterns import Kept, Leaf, Pattern, Recipe, Unknown
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.recovery.workspaces import Workspaces

_MAX_CONSTANT_BYTES = 1 << 20  # of an argument that is copied, a bias for example
_MAX_SEARCHES = 8  # in vain, after which a kind of tensor is not looked at
_MAX_CALLS = 5  # in one recipe
_TIMED_RUNS = 3  # one after the other, as a device works while the next call is made
_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3)  # a node of a layer norm does not keep its own
# Only the running statistics depend on these numbers, and a recipe does not touch running statistics.
_WITHOUT_EFFECT = {"momentum": 0.0, "exponential_average_factor": 0.0}
_STATISTICS = ("running_mean", "running_var")
_VIEWS = frozenset({"view", "unsafe_view", "reshape_alias", "alias"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Trial(NamedTuple):
    """A recipe that gave the same bits, with the time that it took, and the guess that was right."""

    seconds: float
    epsilon: float


class Recipes:
    """Finds patterns, and tries each kind of recipe before it is used."""

    def __init__(self, saved: SavedTensors, workspaces: Workspaces) -> None:
        self._saved = saved
        self._workspaces = workspaces
        self._operators: dict[type, Operator] = {}
        self._tried: dict[tuple[Any, ...], _Trial | None] = {}  # None: the bits were not the same
        self._epsilon = _EPSILONS[0]
        self._is_on_device = False
        self._unknown: dict[tuple[Any, ...], int] = {}  # how often in a row no recipe was found

    def pattern_for(self, base: torch.Tensor) -> Pattern | None:
        """A pattern for the whole storage of a tensor that is being saved; None if there is none that can be used."""
        if base.grad_fn is None or base.untyped_storage().nbytes() != base.nbytes:
            return None
        kind = (type(base.grad_fn), tuple(base.shape), base.dtype)
        if self._unknown.get(kind, 0) >= _MAX_SEARCHES:
            return None
        try:
            with plainly():
                pattern = self._with_epsilon(_EPSILONS[0], base)
                self._unknown[kind] = 0
                if pattern.key not in self._tried:
                    self._tried[pattern.key] = self._trial(base)
                trial = self._tried[pattern.key]
                if trial is None:
                    return None
                if trial.epsilon != _EPSILONS[0]:
                    pattern = self._with_epsilon(trial.epsilon, base)
        except Unknown:
            self._unknown[kind] = self._unknown.get(kind, 0) + 1
            return None
        except (RuntimeError, MemoryError, AttributeError, IndexError):
            return None  # out of memory in a trial: the next step tries again
        pattern.seconds = trial.seconds
        return pattern

    def _with_epsilon(self, epsilon: float, base: torch.Tensor) -> Pattern:
        self._epsilon, self._is_on_device = epsilon, base.is_cuda
        pattern = self._made(base.grad_fn, base.output_nr, _MAX_CALLS, tuple(base.shape), base.dtype)
        own = int(base.untyped_storage()._cdata)
        if any(each.key == own for each in pattern.bound(base.grad_fn, self._saved).sources()):
            raise Unknown
        pattern.layout = tuple(base.shape), base.stride(), base.nbytes
        return pattern

    def _made(
        self, node: Any, index: int, calls: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Pattern:
        """The pattern for one result of a node, with so many calls at most; calls on single elements keep the shape."""
        operator = self._operators.get(type(node))
        if operator is None:
            operator = self._operators[type(node)] = Operator(node)
        if operator.name in _VIEWS and calls:
            view = Pattern(node, torch.reshape, 0)
            view.places["input"] = (0, self._at_edge(node, 0, calls - 1, shape, dtype))
            view.constants["shape"] = shape
            return view.done(["input", "shape"])
        if operator.function is None or not calls or (operator.name == "to_copy" and dtype is None):
            raise Unknown
        pattern = Pattern(node, self._function(operator), index, operator.in_place)
        is_guessed, edges = False, 0
        for argument in operator.arguments:
            name, is_tensor = argument.name, argument.is_tensor
            edge, edges = edges, edges + is_tensor
            if name in _STATISTICS and getattr(node, "_saved_training", False):
                pattern.constants[name] = None
            elif name in operator.saved:
                if is_tensor:
                    pattern.places[name] = (None, self._kept(node, name))
                else:
                    pattern.keep(node, name)
            elif is_tensor and node.next_functions[edge][0] is None:
                if argument.kind == "Tensor":
                    raise Unknown
                pattern.constants[name] = None
            elif is_tensor:
                pattern.places[name] = (edge, self._at_edge(node, edge, calls - 1, shape))
            elif name in _WITHOUT_EFFECT:
                pattern.constants[name] = _WITHOUT_EFFECT[name]
            elif operator.name == "to_copy":
                pattern.constants[name] = dtype if name == "dtype" else _default(argument.schema)
            else:
                is_guessed = True
                pattern.constants[name] = self._epsilon if name == "eps" else _default(argument.schema)
        if is_guessed:  # a guess holds for the calls of one layer, which its weight tells from others
            _, weight = pattern.places.get("weight", (None, None))
            source = self._saved.source(node, "_raw_saved_weight") if isinstance(weight, Kept) else None
            if source is None or not isinstance(weight, Kept):
                raise Unknown
            pattern.places["weight"] = (None, weight._replace(address=source.address))
        return pattern.done([each.name for each in operator.arguments])

    def _function(self, operator: Operator) -> Any:
        if not self._is_on_device or "convolution" not in operator.name:
            return operator.function
        if torch.backends.cudnn.benchmark:
            raise Unknown  # each thread takes the kernel that was fastest in a trial of its own
        return functools.partial(self._workspaces.convolution, operator.function)

    def _at_edge(
        self, node: Any, edge: int, calls: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Kept | Leaf | Pattern:
        """An argument that the node does not keep."""
        before, index = node.next_functions[edge]
        if before is None:
            raise Unknown
        variable = getattr(before, "variable", None)
        if variable is not None:
            if variable.nbytes > _MAX_CONSTANT_BYTES:
                raise Unknown
            return Leaf((tuple(variable.shape), variable.dtype))
        if not index and hasattr(before, "_raw_saved_result"):
            kept = self._kept(before, "result")
            if kept.kind is not None:
                return kept
        return self._made(before, index, calls, shape, dtype)

    def _kept(self, node: Any, name: str) -> Kept:
        """A tensor that a node keeps."""
        name = f"_raw_saved_{name}"
        source = self._saved.source(node, name)
        if source is None and getattr(node, name) is not None:
            raise Unknown  # a hook of the user's would be asked for it
        return Kept(name, None if source is None else source.kind, 0)

    def _trial(self, base: torch.Tensor) -> _Trial | None:
        """Compute a tensor by its recipe; None if not every bit is the same."""
        for epsilon in _EPSILONS:
            pattern = self._with_epsilon(epsilon, base)
            recipe = pattern.bound(base.grad_fn, self._saved)
            held = [each.value() for each in recipe.sources()]  # backward needs them too: not a price of this recipe
            trial = functools.partial(self._timed, recipe, base.detach())
            seconds = _in_backward_thread(trial, base.device) if base.is_cuda else trial()
            if seconds is not None:
                return _Trial(seconds, epsilon)
            del held
            if not _has_epsilon(pattern):
                break
        return None

    def _timed(self, recipe: Recipe, wanted: torch.Tensor) -> float | None:
        """The seconds that a recipe takes; None if the bits are not the wanted ones."""
        with plainly():
            if not _has_same_bits(recipe.compute(), wanted):  # the first run may choose an algorithm
                return None
            started = _now(wanted.device)
            for _ in range(_TIMED_RUNS):
                recipe.compute()
            return (_now(wanted.device) - started) / _TIMED_RUNS


class _InBackward(torch.autograd.Function):
    """Makes a call in a backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return None, None


def _in_backward_thread(call: Callable[[], Any], device: torch.device) -> Any:
    """The result of a call in the thread of a device that runs backward passes: cuDNN chooses kernels for each thread.

    Raises:
        RuntimeError: The call failed.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            start = torch.zeros((), device=device, requires_grad=True)
            result = _InBackward.apply(start, lambda: found.append(call()))  # type: ignore[no-untyped-call]
            engine: Any = torch._C._ImperativeEngine()
            engine.run_backward((result,), (torch.ones_like(result),), False, False, (), False, accumulate_grad=True)
        except Exception as failure:
            found.append(failure)

    thread = threading.Thread(target=run)  # this thread's nodes keep their numbers
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _default(argument: Any) -> Any:
    if argument.has_default_value():
        return argument.default_value
    if str(argument.type) == "bool":
        return False
    raise Unknown


def _has_epsilon(pattern: Pattern) -> bool:
    return "eps" in pattern.constants or any(
        isinstance(each, Pattern) and _has_epsilon(each) for _, each in pattern.places.values()
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_complex():
        return False
    bits = _INTEGERS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))
