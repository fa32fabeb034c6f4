"""Saved tensors that need not be saved: the call that made one is repeated when backward asks for it.

A node of the graph keeps the arguments of its call, and the operator follows from its name. An argument that a node
does not keep is looked for in the node before, or among the parameters. No recipe is believed: before the first use of
each kind, the call is made once and must give the same bits. So a wrong guess costs time, never a wrong gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.recovery.living_tensors import is_unshared, plainly
from torchmedic.recovery.operators import Operator
from torchmedic.recovery.saved_tensors import SavedTensor, SavedTensors

_MAX_CONSTANT_BYTES = 1 << 20  # of an argument that is copied, a bias for example
_MAX_SEARCHES = 8  # in vain, after which a kind of tensor is not looked at
_MAX_CALLS = 5  # in one recipe
_TRIAL_RUNS = 2  # the first run may choose an algorithm; the second one is timed
_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3)  # a node of a layer norm does not keep its own
# Only the running statistics depend on these numbers, and a recipe does not touch running statistics.
_WITHOUT_EFFECT = {"momentum": 0.0, "exponential_average_factor": 0.0}
_STATISTICS = ("running_mean", "running_var")
_VIEWS = frozenset({"view", "unsafe_view", "reshape_alias", "alias"})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Unknown(Exception):
    """There is no recipe."""


class _Trial(NamedTuple):
    """A recipe that gave the same bits, with the time that it took, and the guess that was right."""

    seconds: float
    epsilon: float


class Recipe:
    """A call with its arguments: saved tensors, other recipes, constants."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        index: int,
        key: tuple[Any, ...],
        in_place: Callable[..., Any] | None = None,
    ) -> None:
        self._function = function
        self._in_place = in_place  # the same operator, with the result in its first argument
        self._arguments = arguments
        self._index = index
        self.key = key
        self.seconds = 0.0
        self._shape: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()
        self._nbytes = 0

    def lay_out(self, tensor: torch.Tensor) -> None:
        """Note the layout of the tensor that the result must have."""
        self._shape, self._strides, self._nbytes = tuple(tensor.shape), tensor.stride(), tensor.nbytes

    def sources(self) -> Iterator[SavedTensor]:
        """The saved tensors that the recipe needs."""
        for each in self._arguments.values():
            if isinstance(each, SavedTensor):
                yield each
            elif isinstance(each, Recipe):
                yield from each.sources()

    def compute(self) -> torch.Tensor:
        values = {name: _value(each) for name, each in self._arguments.items()}
        function = self._function
        if self._in_place is not None and self._is_own(list(values.values())):
            function = self._in_place
        result = function(**values)
        found: torch.Tensor = result[self._index] if isinstance(result, tuple | list) else result
        return found

    def _is_own(self, values: list[Any]) -> bool:
        """Whether the first value belongs to this recipe alone, and can take the result."""
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        return (
            isinstance(next(iter(self._arguments.values())), Recipe)
            and tensors[0] is values[0]
            and is_unshared(tensors[0])
            and all((each.dtype, each.shape) == (tensors[0].dtype, tensors[0].shape) for each in tensors)
        )

    def new_storage(self) -> torch.UntypedStorage:
        """A storage of its own with the result, laid out as the original was."""
        with plainly():
            result = self.compute()
            if result.stride() != self._strides or result.untyped_storage().nbytes() != self._nbytes:
                laid_out = torch.empty_strided(self._shape, self._strides, dtype=result.dtype, device=result.device)
                result = laid_out.copy_(result)
        return result.untyped_storage()


class Recipes:
    """Makes recipes, and tries each kind of recipe before it is used."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved
        self._operators: dict[type, Operator] = {}
        self._tried: dict[tuple[Any, ...], _Trial | None] = {}  # None: the bits were not the same
        self._epsilon = _EPSILONS[0]
        self._is_on_device = False
        self._unknown: dict[tuple[Any, ...], int] = {}  # how often in a row no recipe was found

    def recipe_for(self, tensor: torch.Tensor) -> Recipe | None:
        """A recipe for the whole storage of a tensor that is being saved."""
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.grad_fn is None or base.untyped_storage().nbytes() != base.nbytes:
            return None
        kind = (type(base.grad_fn), tuple(base.shape), base.dtype)
        if self._unknown.get(kind, 0) >= _MAX_SEARCHES:
            return None
        try:
            with plainly():
                recipe = self._with_epsilon(_EPSILONS[0], base)
                self._unknown[kind] = 0
                if recipe.key not in self._tried:
                    self._tried[recipe.key] = self._trial(base)
                trial = self._tried[recipe.key]
                if trial is None:
                    return None
                if trial.epsilon != _EPSILONS[0]:
                    recipe = self._with_epsilon(trial.epsilon, base)
        except _Unknown:
            self._unknown[kind] = self._unknown.get(kind, 0) + 1
            return None
        except (RuntimeError, MemoryError, AttributeError, IndexError):
            return None  # out of memory in a trial: the next step tries again
        recipe.seconds = trial.seconds
        return recipe

    def _with_epsilon(self, epsilon: float, base: torch.Tensor) -> Recipe:
        self._epsilon, self._is_on_device = epsilon, base.is_cuda
        recipe = self._made(base.grad_fn, base.output_nr, _MAX_CALLS, tuple(base.shape), base.dtype)
        own = int(base.untyped_storage()._cdata)
        if any(each.place is not None and each.place.key == own for each in recipe.sources()):
            raise _Unknown
        recipe.lay_out(base)
        return recipe

    def _made(
        self, node: Any, index: int, calls: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Recipe:
        """The recipe for one result of a node, with so many calls at most; calls on single elements keep the shape."""
        operator = self._operators.get(type(node))
        if operator is None:
            operator = self._operators[type(node)] = Operator(node)
        if operator.name in _VIEWS and calls:
            inner = self._from_edge(node, 0, calls - 1, shape)
            return Recipe(torch.reshape, {"input": inner, "shape": shape}, 0, ("view", shape, _described(inner)))
        if operator.function is None or not calls or (operator.name == "to_copy" and dtype is None):
            raise _Unknown
        if self._is_on_device and "convolution" in operator.name:
            raise _Unknown  # cuDNN chooses the algorithm by the free memory, and with it the last bits
        arguments: dict[str, Any] = {}
        is_guessed, edges = False, 0
        for argument in operator.arguments:
            name, is_tensor = argument.name, argument.is_tensor
            edge, edges = edges, edges + is_tensor
            if name in _STATISTICS and getattr(node, "_saved_training", False):
                arguments[name] = None
            elif name in operator.saved:
                arguments[name] = self._kept(node, name) if is_tensor else getattr(node, f"_saved_{name}")
            elif is_tensor:
                arguments[name] = self._from_edge(node, edge, calls - 1, shape, is_needed=argument.kind == "Tensor")
            elif name in _WITHOUT_EFFECT:
                arguments[name] = _WITHOUT_EFFECT[name]
            elif operator.name == "to_copy":
                arguments[name] = dtype if name == "dtype" else _default(argument.schema)
            else:
                is_guessed = True
                arguments[name] = self._epsilon if name == "eps" else _default(argument.schema)
        described = [_described(each) for name, each in arguments.items() if name != "eps" or not is_guessed]
        if is_guessed:  # a guess holds for the calls of one layer, which its weight tells from others
            weight = arguments.get("weight")
            if not isinstance(weight, SavedTensor):
                raise _Unknown
            described.append(weight.address)
        return Recipe(operator.function, arguments, index, (operator.name, index, *described), operator.in_place)

    def _from_edge(self, node: Any, edge: int, calls: int, shape: tuple[int, ...], *, is_needed: bool = True) -> Any:
        """An argument that the node does not keep."""
        before, index = node.next_functions[edge]
        if before is None:
            if is_needed:
                raise _Unknown
            return None
        variable = getattr(before, "variable", None)
        if variable is not None:
            return _constant(variable)
        if not index and hasattr(before, "_raw_saved_result"):
            return self._kept(before, "result")
        return self._made(before, index, calls, shape)

    def _kept(self, node: Any, name: str) -> Any:
        """A tensor that a node keeps: a handle of ours, or a small tensor."""
        if node._sequence_nr() not in self._saved.ours:
            raise _Unknown  # a hook of the user's may be asked for it
        found = self._saved.packed(node, f"_raw_saved_{name}")
        if found:
            return found[0]
        value = getattr(node, f"_saved_{name}")
        return None if value is None else _constant(value)

    def _trial(self, base: torch.Tensor) -> _Trial | None:
        """Compute a tensor by its recipe; None if not every bit is the same."""
        for epsilon in _EPSILONS:
            recipe = self._with_epsilon(epsilon, base)
            held = [each.unpack() for each in recipe.sources()]  # backward needs them too: not a price of this recipe
            for run in range(_TRIAL_RUNS):
                started = _now(base.device)
                found = recipe.compute()
                seconds = _now(base.device) - started
                if not run and not _has_same_bits(found, base.detach()):
                    break
            else:
                return _Trial(seconds, epsilon)
            del held
            if not _has_epsilon(recipe):
                break
        return None


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a small tensor: it may be changed before backward. Made without a graph."""
    if tensor.nbytes > _MAX_CONSTANT_BYTES:
        raise _Unknown
    return tensor.detach().clone()


def _default(argument: Any) -> Any:
    if argument.has_default_value():
        return argument.default_value
    if str(argument.type) == "bool":
        return False
    raise _Unknown


def _described(value: Any) -> Any:
    """What tells one kind of argument from another."""
    if isinstance(value, SavedTensor):
        return value.kind
    if isinstance(value, Recipe):
        return value.key
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def _value(argument: Any) -> Any:
    if isinstance(argument, SavedTensor):
        return argument.unpack()
    return argument.compute() if isinstance(argument, Recipe) else argument


def _has_epsilon(recipe: Recipe) -> bool:
    return any(
        (name == "eps" or (isinstance(each, Recipe) and _has_epsilon(each))) for name, each in recipe._arguments.items()
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
