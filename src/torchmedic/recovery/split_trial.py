"""A trial before a call of a module is made in parts: are its rows independent, and does it leave no trace?

Some rows are computed as a whole and as two parts; results and gradients must be the same up to rounding. Then the
results of all rows are compared, without their graph, in pieces as large as memory allows: a limit for each expert, or
a rare row, shows among many rows only. The trial runs in the isolation of a replay: nothing that it does outlives it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.detect.failures.exhaustion import is_out_of_memory
from torchmedic.recovery.call_in_parts import casting, casts, gradients_of
from torchmedic.recovery.random_calls import is_seeded, random_state
from torchmedic.recovery.room import free_unused_memory
from torchmedic.recovery.rows import CannotSplit, Joined, RowCall, tensors_of
from torchmedic.replay.isolation.outside_world import is_sealed, refusals
from torchmedic.replay.isolation.python_state import THOROUGH_SECONDS, TooMuchInReach, python_left_alone
from torchmedic.replay.isolation.sandbox import harmless
from torchmedic.replay.isolation.torch_state import muted, put_back, same_random_numbers
from torchmedic.replay.isolation.undo import random_numbers
from torchmedic.replay.step.side_effects import RestoreWrites
from torchmedic.source.objects.graph import is_counted, leaves_behind, walk

_ROWS = (5, 3, 2)  # as many as there is memory for
_MAX_COMPARED = 1 << 16  # elements of a weight whose gradient is compared
_SMALL_GRADIENT = 0.01  # of the largest gradient: those below can be all rounding, as that of a bias before a softmax
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")
_DEPENDENT = "its rows depend on each other (batch norm in training, or another statistic over the batch)"


class NoMemory(CannotSplit):
    """There was not even memory for a trial, this time."""


class Verdict(NamedTuple):
    """What is known about a call that can be made in parts."""

    leaves: list[torch.Tensor]  # beside arguments and parameters, that it gives gradients to
    draws: bool  # random numbers


class _Still(TorchDispatchMode):
    """Nothing is drawn: each draw gives one value, so that parts can be compared. No other rank is asked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in _COLLECTIVE:
            raise CannotSplit("it talks to other ranks")
        name = func.__name__.partition(".")[0].rstrip("_")
        if not is_seeded(name):
            return func(*args, **kwargs)
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        given = dict(zip(defaults, args, strict=False)) | kwargs
        kept = 1.0 if name == "bernoulli" else 0.0
        chance = next((name for name in ("dropout_p", "dropout", "p") if name in defaults), None)
        if chance is None:
            self.draws = True
            result = func(*args, **kwargs)
            for each in tensors_of(result):
                each.fill_(0.5 if each.is_floating_point() else 0)
            return result
        self.draws |= given.get(chance, defaults[chance]) != kept
        given[chance] = kept
        return func(**given)


def tried(call: RowCall, module: torch.nn.Module) -> Verdict:
    """Try a call.

    Raises:
        CannotSplit: It cannot be made in parts.
    """
    said = io.StringIO()
    still, writes = _Still(), RestoreWrites([])
    before, shared = random_state(), list(random_numbers())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(muted())
            stack.enter_context(same_random_numbers())
            isolated = python_left_alone if is_sealed() else harmless
            noted = stack.enter_context(isolated(sys._getframe(1), thorough=THOROUGH_SECONDS))
            stack.enter_context(_same_buffers(module))
            for each in (contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)):
                stack.enter_context(each)
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(writes)
            stack.enter_context(still)
            refused, changed = refusals(), noted.changed  # by the isolation itself
            leaves = _leaves_of_some_rows(call, module)
            _compare_many_rows(call)
            if said.getvalue():
                raise CannotSplit("it prints")
            if writes.has_written:
                raise CannotSplit("it writes to a tensor that outlives the call (running statistics, a cache)")
            if noted.changed != changed:
                raise CannotSplit("it leaves a trace in Python (a counter, a list, a cache)")
            if refusals() != refused:
                raise CannotSplit("it reaches outside of the process")
            if any(each.has_changed for each in shared) or (not before.is_same(random_state()) and not still.draws):
                raise CannotSplit("it draws random numbers that cannot be drawn again")
    except TooMuchInReach as reason:
        raise CannotSplit(str(reason)) from None
    except CannotSplit:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise NoMemory("there is no memory for a trial") from None
        raise CannotSplit(f"a trial with {min(_ROWS[0], call.count)} rows failed ({_first_line(error)})") from None
    return Verdict(leaves, still.draws)


def _leaves_of_some_rows(call: RowCall, module: torch.nn.Module) -> list[torch.Tensor]:
    """Compare some rows, fewer where memory ends; returns the leaves that get gradients."""
    for count in _ROWS:
        try:
            return _compared(call, module, min(count, call.count))
        except Exception as error:
            if count == _ROWS[-1] or not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
        free_unused_memory()
    raise AssertionError


def _compared(call: RowCall, module: torch.nn.Module, count: int) -> list[torch.Tensor]:
    """Compute so many rows as a whole and in parts; returns the leaves that get gradients."""
    picked = torch.linspace(0, call.count - 1, count).long().unique()
    first = max(len(picked) // 2, 1)
    needed = [each.requires_grad and torch.is_grad_enabled() for each in call.tensors]
    whole = _Part(call, picked, needed)
    parts = [_Part(call, rows, needed) for rows in (picked[:first], picked[first:])]
    joined = _joined([whole])
    tolerance = _tolerance([*joined, *call.tensors])
    _check_same(joined, _joined(parts), tolerance)
    leaves = whole.leaves()
    mine = {id(each) for each in module.parameters()}
    if any(each._backward_hooks for each in [*leaves, *module.parameters()]):
        raise CannotSplit("a parameter has a hook, which would run for each part")
    compared = [each for each in leaves if each.numel() <= _MAX_COMPARED]
    outer = [torch.arange(each.numel()).cos().reshape(each.shape).to(each) for each in joined]
    wanted = whole.gradients(outer, compared)
    found = [
        parts[0].gradients([each[:first] for each in outer], compared),
        parts[1].gradients([each[first:] for each in outer], compared),
    ]
    least = _SMALL_GRADIENT * max((_largest(each) for each in wanted if each is not None), default=0.0)
    for index, one in enumerate(wanted):
        pair = [each[index] for each in found]
        is_row = index < len(call.tensors) and call.has_rows[index]
        if not _is_same_gradient(one, pair, tolerance, least, is_row=is_row):
            raise CannotSplit(_DEPENDENT)
    return [each for each in leaves if id(each) not in mine]


def _compare_many_rows(call: RowCall) -> None:
    """Compute all rows without a graph, in pieces as large as memory allows, and each piece in two parts."""
    size, start = call.count, 0
    while start < call.count and size > _ROWS[0]:
        rows = [torch.arange(start, min(start + size, call.count))]
        try:
            with torch.no_grad():
                pieces = [_Part(call, each) for each in (*rows, *rows[0].tensor_split(2)) if len(each)]
                whole, parts = _joined(pieces[:1]), _joined(pieces[1:])
                _check_same(whole, parts, _tolerance([*whole, *call.tensors]))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            size = (size + 1) // 2
            pieces, whole, parts = [], [], []
            free_unused_memory()
        else:
            start += size


def _joined(parts: Sequence[_Part]) -> list[torch.Tensor]:
    joined, start = Joined(sum(each.count for each in parts)), 0
    for each in parts:
        joined.add(each.result, slice(start, start + each.count))
        start += each.count
    return joined.tensors


def _check_same(whole: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], tolerance: float) -> None:
    """Compare the results of rows as a whole and in parts.

    Raises:
        CannotSplit: They are not the same.
    """
    if len(whole) != len(parts):
        raise CannotSplit("its result has another structure for other rows")
    if not all(_is_close(one, other, tolerance) for one, other in zip(whole, parts, strict=True)):
        raise CannotSplit(_DEPENDENT)


class _Part:
    """Some rows of a call, with their graph."""

    def __init__(self, call: RowCall, rows: torch.Tensor, needed: Sequence[bool] | None = None) -> None:
        self.count = len(rows)
        self._needed = needed or [False] * len(call.tensors)
        self._began = torch._C._autograd._get_sequence_nr()
        self._inputs = call.part(call.tensors, rows, self._needed)
        with casting(casts(call.tensors)):
            self.result = call.result(self._inputs)
        self._tensors = tensors_of(self.result)

    def leaves(self) -> list[torch.Tensor]:
        """The leaves behind the results that are no arguments.

        Raises:
            CannotSplit: The graph goes on behind the call.
        """
        roots = [each for each in self._tensors if each.requires_grad]
        if any(is_counted(node) and node._sequence_nr() < self._began for node in walk(each.grad_fn for each in roots)):
            raise CannotSplit("it uses a result of other calls that is none of its arguments")
        mine = {id(each) for each in self._inputs}
        return [each for each in leaves_behind(roots) if id(each) not in mine]

    def gradients(self, outer: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        inputs = [each for each in self._inputs if each.requires_grad]
        pairs = [pair for pair in zip(self._tensors, outer, strict=True) if pair[0].requires_grad]
        if not pairs or not (inputs or leaves):
            return [None] * (len(self._needed) + len(leaves))
        roots, given = zip(*pairs, strict=True)
        found = iter(gradients_of(roots, given, [*inputs, *leaves]))
        return [next(found) if needed else None for needed in self._needed] + list(found)


def _is_same_gradient(
    whole: torch.Tensor | None, parts: Sequence[torch.Tensor | None], tolerance: float, least: float, *, is_row: bool
) -> bool:
    given = [each for each in parts if each is not None]
    if whole is None or not given:
        return not given and whole is None
    if is_row:
        return len(given) == len(parts) and _is_close(whole, torch.cat(given), tolerance, least)
    return _is_close(whole, sum(given[1:], given[0]), tolerance, least)


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float, least: float = 0.0) -> bool:
    """Whether two tensors differ by less than a share of the largest value, which counts as `least` at least."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    same = one == other  # infinite, too
    difference = torch.where(same | (one.isnan() & other.isnan()), 0, one - other)
    return _largest(difference, fallback=float("inf")) <= tolerance * max(_largest(one), least)


def _largest(tensor: torch.Tensor, fallback: float = 0.0) -> float:
    """The largest finite value; not-a-number counts as the fallback."""
    if not tensor.numel():
        return 0.0
    found = tensor.detach().abs().double()
    return float(torch.where(found.isfinite(), found, fallback).max())


def _tolerance(tensors: Sequence[torch.Tensor]) -> float:
    """Between rounding and a difference that matters: half of the digits of the coarsest type."""
    kinds = {each.dtype for each in tensors if each.is_floating_point()}
    kinds |= {torch.get_autocast_dtype(each.device.type) for each in tensors[:1] if _is_autocast(each)}
    coarse = max((torch.finfo(each).eps for each in kinds), default=1e-7)
    uses_tf32 = tensors[0].is_cuda and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
    return float(max(coarse, 1e-3 if uses_tf32 else 0.0) ** 0.5)


def _is_autocast(tensor: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(tensor.device.type)


@contextlib.contextmanager
def _same_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Put back running statistics: not all kernels say that they write to them."""
    before = [(each, each.clone()) for each in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in before:
                put_back(each, value)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
