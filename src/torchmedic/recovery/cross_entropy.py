"""Cross entropy in parts: a loss over many classes without the copies of the logits that torch makes of them.

Torch keeps the log-softmax of all rows and makes two gradients of the same size in backward: with a large vocabulary
that is the largest need of a step. Every row is independent, so the rows are taken in parts here, by the same kernels.
Only the sum over the rows is taken as a whole. Before the first use of each kind, loss and gradient of some rows are
compared with torch's own, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from torchmedic.recovery.living_tensors import is_unshared, plainly, unseen
from torchmedic.recovery.room import in_use_and_limit
from torchmedic.source.objects.graph import walk

_MIN_BYTES = 16 << 20  # of a log-softmax, below which nothing is gained
_PARTS = 32  # in which a loss is computed
_MIN_PART_ROWS = 64  # parts of so many rows, or of a multiple, begin at an aligned address
_MAX_TRIAL_PARTS = 2
_COPIES = 4  # log-softmax, two gradients, and some room
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_NO_CLASS = -100
_forward, _backward = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss_backward.default
_softmax_backward = torch.ops.aten._log_softmax_backward_data.default


class _Settings(NamedTuple):
    """Everything about a call but its tensors."""

    dtype: torch.dtype  # of the log-softmax: another one than the logits' under autocast
    reduction: int
    no_class: int  # rows with this target do not count
    rows: int  # in a part


class CrossEntropyInParts:
    """Makes such calls, and tries each kind before its first use."""

    def __init__(self) -> None:
        self.is_on = False  # once memory has run out
        self.is_refused = False  # a gradient of a gradient was asked for
        self.is_trying = False  # the backward pass that runs is part of a trial
        self.may_overwrite = False  # the backward pass that runs is the last one through its graph
        self.possible_bytes = 0  # that a step needs less in parts
        self._tried: dict[tuple[Any, ...], bool] = {}
        self._logits: list[weakref.ref[torch.Tensor]] = []  # that a backward will need

    def next_step(self) -> None:
        self.possible_bytes = 0
        self._logits = []

    def is_short(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether memory is too short for a call as a whole and its backward pass."""
        found = self._settings(args, kwargs)
        if found is None:
            return False
        nbytes = found[0].numel() * found[2].dtype.itemsize
        self.possible_bytes = max(self.possible_bytes, 2 * nbytes)
        memory = in_use_and_limit(found[0].device)
        return memory is not None and memory[1] - memory[0] < _COPIES * nbytes

    def result(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The loss in parts; None where the call is not taken apart, or the bits would not be the same."""
        found = self._settings(args, kwargs)
        if found is None:
            return None
        logits, target, settings = found
        kind = (logits.dtype, logits.device, logits.shape[1], *settings)
        if kind not in self._tried:
            self._tried[kind] = self._has_same_bits(logits, target, settings)
        if not self._tried[kind]:
            return None
        return _apply(logits, target, settings, self)

    def backward_bytes(self) -> int:
        """The bytes that backward needs beside the logits: none if it can overwrite them."""
        living = [each for reference in self._logits if (each := reference()) is not None]
        return sum(each.nbytes // (_PARTS // 3) + (0 if is_unshared(each) else each.nbytes) for each in living)

    def made(self, value: Any) -> bool:
        """Whether a value is the result of a call in parts."""
        return isinstance(value, torch.Tensor) and isinstance(value.grad_fn, _NODE)

    def release(self, roots: Iterable[torch.Tensor]) -> None:
        """Free the logits of a graph that no backward pass will complete."""
        for node in walk(root.grad_fn for root in roots):
            if isinstance(node, _NODE):
                node.logits = None

    def will_need(self, logits: torch.Tensor) -> None:
        self._logits.append(weakref.ref(logits))

    def _settings(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, _Settings] | None:
        return None if self.is_refused or not torch.is_grad_enabled() else _settings(*args, **kwargs)

    def _has_same_bits(self, logits: torch.Tensor, target: torch.Tensor, settings: _Settings) -> bool:
        rows = min(_MAX_TRIAL_PARTS * settings.rows - 1, len(logits))
        reduction = next(name for name, number in _REDUCTIONS.items() if number == settings.reduction)
        found = []
        self.is_trying = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is), unseen():
                for in_parts in (True, False):
                    some = logits.detach()[:rows].clone().requires_grad_()
                    if in_parts:
                        loss = _apply(some, target[:rows], settings, CrossEntropyInParts())
                    else:
                        loss = F.cross_entropy(some, target[:rows], ignore_index=settings.no_class, reduction=reduction)
                    found.append((loss.detach(), *torch.autograd.grad(loss.sum(), some)))
        finally:
            self.is_trying = False
        return all(one.dtype == other.dtype and _is_equal(one, other) for one, other in zip(*found, strict=True))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, settings: _Settings, owner: CrossEntropyInParts
    ) -> torch.Tensor:
        # Not by `save_for_backward`: that would hide whether anybody else still uses the logits.
        ctx.logits, ctx.target, ctx.versions = logits.detach(), target.detach(), (logits._version, target._version)
        ctx.settings, ctx.owner = settings, owner
        ctx._saved_reduction = settings.reduction  # as torch's own node of this name has it
        owner.will_need(ctx.logits)
        with plainly():
            picked = torch.empty(len(logits), 1, dtype=settings.dtype, device=logits.device)
            for part in _parts(settings.rows, len(logits)):
                softmax = torch.log_softmax(logits[part].to(settings.dtype), 1)
                picked[part, 0] = _forward(softmax, target[part], None, 0, settings.no_class)[0].neg_()
            if settings.reduction == 0:
                return picked.squeeze(1).neg_()
            # The kernel adds up rows in the same order, however many classes there are.
            column = torch.where(target == settings.no_class, _NO_CLASS, 0)
            loss, ctx.total = _forward(picked, column, None, settings.reduction, _NO_CLASS)
            return cast(torch.Tensor, loss)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, target, settings = ctx.logits, ctx.target, ctx.settings
        if logits is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed)."
            )
        if (logits._version, target._version) != ctx.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        total = ctx.total if settings.reduction else torch.ones((), dtype=settings.dtype, device=logits.device)
        with plainly():
            if ctx.owner.may_overwrite and is_unshared(logits):
                ctx.logits, result = None, logits
            else:
                result = torch.empty_like(logits)
            for part in _parts(settings.rows, len(logits)):
                softmax = torch.log_softmax(logits[part].to(settings.dtype), 1)
                outer = gradient if settings.reduction else gradient[part]
                inner = _backward(outer, softmax, target[part], None, settings.reduction, settings.no_class, total)
                result[part] = _softmax_backward(inner, softmax, 1, settings.dtype)
        return result, None, None, None


def _settings(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, _Settings] | None:
    """The tensors of a call with its settings; None for a call that is not taken apart."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    if type(input) is not torch.Tensor or type(target) is not torch.Tensor or reduction not in _REDUCTIONS:
        return None
    if input.dim() != 2 or target.dim() != 1 or len(input) != len(target) or not input.is_floating_point():
        return None
    if not input.requires_grad or target.dtype is not torch.int64 or target.device != input.device:
        return None
    is_cast = torch.is_autocast_enabled(input.device.type) and input.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if is_cast else input.dtype
    if input.numel() * dtype.itemsize < _MIN_BYTES or not input.is_contiguous():
        return None
    rows = -(-len(input) // (_PARTS * _MIN_PART_ROWS)) * _MIN_PART_ROWS
    return input, target, _Settings(dtype, _REDUCTIONS[reduction], ignore_index, rows)


def _parts(rows: int, count: int) -> Iterator[slice]:
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


_apply = cast("Callable[..., torch.Tensor]", _Loss.apply)
_NODE: Any = _Loss._backward_cls
_NODE.__name__ = "NllLossBackward0"  # `print(loss)` shows it
