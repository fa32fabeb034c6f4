"""Whether the loss, the gradients and the weights are finite, asked so that nothing waits and next to nothing is spent.

The loss is read when backward begins: at once on the CPU; on CUDA it is copied to pinned memory behind an event, and
looked at when the optimizer is about to step. Gradients are looked at there too, on the CPU all of them as long as that
stays within a small share of the run's time, else the first and now and then another; and so are the weights after
the step.

A bad loss on the CPU is examined at once, while its batch is there, but nothing is said before an update is about to
use its gradients: a script may well drop them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

import torch

_NODES = 2000  # of a graph that is walked to its leaves
_SMALL_ROOT = 4096  # elements of a loss that is looked at whole
_ALLOWANCE = 0.05  # seconds that may be spent on gradients in any case
_SHARE = 0.002  # of the time since training began, beyond that
_REST = 16  # looks, of which one goes beyond the first tensor when the time is used up
_SMALL_TENSOR = 1 << 14  # elements that cost about as much to look at as one
_EXAMINED_AHEAD = 2  # bad losses that are examined before it is known whether their gradients are used
_LOSSES = 100  # of the last steps, kept for the trend
_SKIPPED_BAD = 3  # steps in a row that GradScaler skips although the loss itself was bad: no scale helps
_SKIPPED = 25  # steps in a row that GradScaler skips at all


class Examiner(Protocol):
    """Whoever finds the origin of a bad number."""

    def examine(self, optimizer: Any, frame: FrameType, what: str, at: str) -> Any:
        """Look into it now; the finding is kept until it is known to matter."""

    def publish(self, finding: Any) -> None:
        """It matters."""


class FiniteWatch:
    """Notices the first step that is about to write NaN or infinity into the weights."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner
        self.on = True
        self.losses: dict[Any, deque[float]] = {}  # by the line that calls backward
        self.last_losses: list[float] = []  # of the last backward
        self.last_key: Any = None
        self.skipped = 0  # steps in a row that GradScaler skipped
        self.lowest_scale: float | None = None
        self._bad_losses = 0  # since the gradients were cleared
        self._last_is_bad = False
        self._finding: Any = None
        self._witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self._examined = 0
        self._backwards = 0
        self._steps = 0
        self._skipped_bad = 0
        self._roots: list[weakref.ref[torch.Tensor]] = []
        self._pending: list[tuple[Any, torch.Tensor, Any]] = []
        self._places: dict[tuple[int, torch.dtype], tuple[torch.Tensor, Any]] = {}
        self._place = 0
        self._unscaled: tuple[weakref.ref[torch.Tensor], float] | None = None
        self._born_bad: set[int] = set()
        self._started = time.monotonic()
        self._spent = 0.0
        self._turn = 0

    # The loss

    def scaled(self, outputs: Any, result: Any) -> None:
        """GradScaler multiplied a loss: what counts is whether it was finite before."""
        if (
            isinstance(outputs, torch.Tensor)
            and isinstance(result, torch.Tensor)
            and result is not outputs  # a scaler that is switched off
            and outputs.device.type == "cpu"
            and outputs.numel() == 1
        ):
            self._unscaled = (weakref.ref(result), float(outputs.detach().item()))

    @property
    def is_scaled(self) -> bool:
        """Whether the last loss went through a GradScaler."""
        return self._unscaled is not None

    def backward_begins(self, roots: Sequence[torch.Tensor], key: Any = None) -> None:
        self._last_is_bad = False
        self._backwards += 1
        self.last_losses = []
        self.last_key = key
        self._roots = [weakref.ref(root) for root in roots if isinstance(root, torch.Tensor)]
        for root in roots:
            if not isinstance(root, torch.Tensor) or not root.is_floating_point() or root.numel() > _SMALL_ROOT:
                continue
            if root.device.type == "cpu":
                self._look(root, key)
            elif root.device.type == "cuda" and root.numel() == 1:
                self._copy_later(root, key)

    def _look(self, root: torch.Tensor, key: Any) -> None:
        if root.numel() != 1:
            self._last_is_bad |= _is_bad(root)
        else:
            unscaled = self._unscaled
            is_scaled = unscaled is not None and unscaled[0]() is root
            loss = unscaled[1] if unscaled is not None and is_scaled else float(root.detach().item())
            self._note_loss(loss, key)
            self._last_is_bad |= not math.isfinite(loss)
        self._bad_losses += self._last_is_bad

    def _note_loss(self, loss: float, key: Any) -> None:
        self.last_losses.append(loss)
        known = self.losses.get(key)
        if known is None:
            if len(self.losses) >= 16:
                return
            known = self.losses[key] = deque(maxlen=_LOSSES)
        known.append(loss)

    def _copy_later(self, root: torch.Tensor, key: Any) -> None:
        # Pinned memory that is handed back and forth costs a hundred microseconds a step: two places are kept.
        self._place ^= 1
        host, event = self._places.get((self._place, root.dtype)) or self._new_place(root.dtype)
        host.copy_(root.detach().reshape(()), non_blocking=True)
        event.record()
        self._pending = [(key, host, event)]

    def _new_place(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        made = (torch.empty((), dtype=dtype, pin_memory=True), torch.cuda.Event())
        self._places[self._place, dtype] = made
        return made

    def backward_ended(self, frame: FrameType, optimizers: Sequence[Any], stepping: Any) -> None:
        """Backward is over.

        Args:
            frame: Somewhere below the user's call.
            optimizers: Those that there are.
            stepping: The optimizer whose step is under way: backward was called by a closure.
        """
        if self._last_is_bad:
            self._witness = _witness(optimizers)
        used = stepping is not None or (self._steps == 0 and (not optimizers or self._backwards > 2))
        if self._last_is_bad and self._unscaled is None:
            if self._finding is None and (used or self._examined < _EXAMINED_AHEAD):
                self._examined += 1
                self._finding = self._examiner.examine(stepping, frame, "loss", "backward")
            if used and self._finding is not None:
                self._publish(self._finding)
        elif stepping is not None and self._any_bad(_gradients(stepping)):
            self._publish(self._examiner.examine(stepping, frame, "gradient", "backward"))
        elif not optimizers and self._has_time and self._any_bad(_leaf_gradients(self._roots)):
            # Nobody will step: the loop updates its weights by hand.
            self._publish(self._examiner.examine(None, frame, "gradient", "backward"))

    def cleared(self) -> None:
        """The gradients of what was suspected are gone."""
        self._bad_losses = 0
        self._finding = None

    # The gradients

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        """The weights are about to be touched: the last moment at which the step can be replayed as it was."""
        self._settle_pending()
        if self._steps == 0:
            self._born_bad = {id(tensor) for tensor in _with_gradient(optimizer) if _is_bad(tensor)}
        self._steps += 1
        self.skipped = self._skipped_bad = 0
        suspect, finding = self._bad_losses > 0, self._finding
        kept = self._last_is_bad or _is_there(self._witness)
        self.cleared()
        on_cpu = _is_on_cpu(optimizer)
        if not _finite_rates(optimizer):
            self._publish(self._examiner.examine(optimizer, frame, "rate", "step"))
        elif suspect:
            if kept or any(_is_bad(gradient) for gradient in _gradients(optimizer)):
                self._publish(finding or self._examiner.examine(optimizer, frame, "loss", "step"))
        elif on_cpu and (self._any_bad(_gradients(optimizer)) if self._is_due() else _first_is_bad(optimizer)):
            self._publish(self._examiner.examine(optimizer, frame, "gradient", "step"))

    def step_ended(self, optimizer: Any, frame: FrameType) -> None:
        """The weights have been touched, with gradients that were looked at."""
        if not _is_on_cpu(optimizer) or (not self._has_time and self._steps % _REST):
            return
        weights = [tensor for tensor in _with_gradient(optimizer) if id(tensor) not in self._born_bad]
        if self._any_bad(weights):
            self._publish(self._examiner.examine(optimizer, frame, "update", "update"))

    def step_skipped(self, scaler: Any, optimizer: Any, frame: FrameType) -> None:
        """GradScaler found infinities among the gradients and left the weights alone. Now and then that is normal."""
        self._settle_pending()
        self.skipped += 1
        self._skipped_bad = self._skipped_bad + 1 if self._last_is_bad else 0
        self.cleared()
        if self._skipped_bad >= _SKIPPED_BAD:
            self._publish(self._examiner.examine(optimizer, frame, "loss", "step"))
        elif self.skipped >= _SKIPPED:
            self.lowest_scale = float(scaler.get_scale())
            self._publish(self._examiner.examine(optimizer, frame, "scale", "step"))

    def _settle_pending(self) -> None:
        for key, host, event in self._pending:
            event.synchronize()  # recorded before backward: what is waited for is long done
            loss = float(host)
            self._note_loss(loss, key)
            self._last_is_bad = not math.isfinite(loss)
            self._bad_losses += self._last_is_bad
        self._pending = []

    def _publish(self, finding: Any) -> None:
        self.on = False
        if finding is not None:
            self._examiner.publish(finding)

    def _is_due(self) -> bool:
        """Whether there is time for more than a look at the first tensor."""
        self._turn += 1
        return self._turn % _REST == 0 or self._has_time

    def _any_bad(self, tensors: list[torch.Tensor]) -> bool:
        """Whether some of these are not finite, as far as the time for looking goes."""
        if not tensors:
            return False
        started = time.perf_counter()
        looked_at = tensors if self._has_time else [tensors[0], tensors[self._turn // _REST % len(tensors)]]
        bad = any(_is_bad(tensor) for tensor in looked_at)
        self._spent += time.perf_counter() - started
        return bad

    @property
    def _has_time(self) -> bool:
        return self._spent < _ALLOWANCE + _SHARE * (time.monotonic() - self._started)


def _witness(optimizers: Sequence[Any]) -> tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None:
    """A gradient that a bad loss went into: while it is there, it has not been dropped by means that are not seen."""
    for optimizer in optimizers:
        for tensor in _with_gradient(optimizer):
            if tensor.grad is not None:
                return weakref.ref(tensor), weakref.ref(tensor.grad)
    return None


def _is_there(witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None) -> bool:
    if witness is None:
        return False
    tensor, gradient = witness[0](), witness[1]()
    return tensor is not None and gradient is not None and tensor.grad is gradient


def _is_on_cpu(optimizer: Any) -> bool:
    """Whether the values can be looked at without waiting; told by the first parameter."""
    return any(group["params"][0].device.type == "cpu" for group in optimizer.param_groups[:1] if group["params"])


def _first_is_bad(optimizer: Any) -> bool:
    """The first tensor of a model is the last that backward reaches: what is bad anywhere tends to arrive there."""
    gradient = optimizer.param_groups[0]["params"][0].grad
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and 0 < gradient.numel() <= _SMALL_TENSOR
        and _is_bad(gradient)
    )


def _with_gradient(optimizer: Any) -> list[torch.Tensor]:
    return [
        tensor
        for group in optimizer.param_groups
        for tensor in group["params"]
        if tensor.grad is not None and tensor.grad.layout is torch.strided and tensor.numel()
    ]


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [tensor.grad for tensor in _with_gradient(optimizer) if tensor.grad is not None]


def _leaf_gradients(roots: Sequence[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """The gradients of the leaves behind some roots on the CPU."""
    pending = [root.grad_fn for reference in roots if (root := reference()) is not None and root.device.type == "cpu"]
    seen: set[Any] = set()
    found: list[torch.Tensor] = []
    while pending and len(seen) < _NODES:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable.grad is not None and variable.grad.layout is torch.strided:
            found.append(variable.grad)
        pending.extend(later for later, _ in node.next_functions)
    return found


def _finite_rates(optimizer: Any) -> bool:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, float) and not math.isfinite(rate):
            return False
    return True


def _is_bad(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.numel() == 1:
        value = tensor.item()
        return not (math.isfinite(value) if isinstance(value, int | float) else math.isfinite(abs(value)))
    # One reduction: a sum is finite only if every element is. An overflow of the sum itself is looked at again.
    total = tensor.sum().item()
    if math.isfinite(total if isinstance(total, float) else abs(total)):
        return False
    return not bool(torch.isfinite(tensor).all().item())
