"""Whether the loss, the gradients and the weights are finite, asked so that nothing waits and next to nothing is spent.

The loss is read when backward begins: at once on the CPU; on a device that is read late it is copied to pinned memory
behind an event, and looked at when the optimizer is about to step. Gradients are looked at there too, but only on the
CPU: all of them as long as that stays within a small share of the run's time, else the first and now and then another;
and so are the weights after the step. What a bad gradient does on a late device shows in the next loss; for that the
last calls of backward and a copy of the weights are kept (`past`, `rewind`).

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

from torchmedic.observe import late
from torchmedic.observe.past import Past, Pasts
from torchmedic.observe.rewind import Rewind

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
_HELD = 64  # losses that are kept on a device before they are read
_PLACES = 16  # losses of a late device that are under way at a time


class Examiner(Protocol):
    """Whoever finds the origin of a bad number."""

    def examine(self, optimizer: Any, frame: FrameType, what: str, at: str) -> Any:
        """Look into it now; the finding is kept until it is known to matter."""

    def publish(self, finding: Any) -> None:
        """It matters."""

    def device_died(self, error: BaseException, frame: FrameType) -> None:
        """A device has failed, which was seen when a loss was to be read."""

    def usual_step(self) -> tuple[int, float]:
        """The number of the step, and how many seconds one takes."""

    def mark(self, what: str) -> None:
        """Have the device say when it has come this far."""


class Optimizers(Protocol):
    """Whoever knows the optimizers."""

    optimizer_count: int

    @property
    def optimizers(self) -> list[Any]: ...


class FiniteWatch:
    """Notices the first step that is about to write NaN or infinity into the weights."""

    def __init__(self, examiner: Examiner, pasts: Pasts, rewind: Rewind) -> None:
        self._examiner = examiner
        self._pasts = pasts
        self._rewind = rewind
        self.on = True
        self.bad_call: Past | None = None  # the first with a bad loss, of those that are read late
        self.born_bad: set[int] = set()  # weights that were not finite when training began
        self.losses: dict[Any, deque[float]] = {}  # by the line that calls backward
        self.last_losses: list[float] = []  # of the last backward
        self.last_key: Any = None
        self.skipped = 0  # steps in a row that GradScaler skipped
        self.lowest_scale: float | None = None
        self._bad_losses = 0  # since the gradients were cleared
        self._last_is_bad = False
        self._is_good = False  # the losses that were read last, on a late device, and no other is under way
        self._finding: Any = None
        self._witness: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        self._examined = 0
        self._backwards = 0
        self._steps = 0
        self._skipped_bad = 0
        self._roots: list[weakref.ref[torch.Tensor]] = []
        self._pending: list[tuple[Any, torch.Tensor, Any, Past]] = []
        self._places: dict[tuple[int, torch.dtype], tuple[torch.Tensor, Any]] = {}
        self._place = 0
        self._held: list[tuple[torch.Tensor, Past]] = []  # losses that are still on the device
        self._many: tuple[torch.Tensor, Any] | None = None  # where they are copied to
        self._under_way: list[Past] = []  # the calls whose losses are
        self._unscaled: tuple[weakref.ref[torch.Tensor], float] | None = None
        self._seen: set[int] = set()  # optimizers that have stepped
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

    def backward_begins(self, roots: Sequence[torch.Tensor], key: Any, frame: FrameType) -> None:
        self._last_is_bad = False
        self._backwards += 1
        self.last_losses = []
        self.last_key = key
        if self._steps == 0:  # as long as there may be nobody who steps
            self._roots = [weakref.ref(root) for root in roots if isinstance(root, torch.Tensor)]
        for root in roots:
            if not isinstance(root, torch.Tensor) or not root.is_floating_point():
                continue
            size = root.numel()
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in late.devices:
                if size == 1:
                    self._copy_later(root, kind, key, frame)
            elif kind == "cpu" and size <= _SMALL_ROOT:
                self._look(root, size, key)

    @property
    def is_alarmed(self) -> bool:
        """Whether the last loss was not finite."""
        return self._last_is_bad

    def thin_backward_begins(self, roots: Sequence[torch.Tensor], step: int) -> None:
        """The same in a step of which little is noted: the loss of a late device is kept there for a while."""
        self._last_is_bad = self._is_good = False
        self._backwards += 1
        self.last_losses = []
        for root in roots:
            if not isinstance(root, torch.Tensor) or root.numel() != 1 or not root.is_floating_point():
                continue
            kind = "cpu" if root.is_cpu else root.device.type
            if kind in late.devices:
                self._held.append((root.detach(), self._pasts.record_thin(step, self._steps)))
                if len(self._held) >= _HELD:
                    self._read_later(kind)
            elif kind == "cpu":
                self._look(root, 1, self.last_key)

    @property
    def holds_losses(self) -> bool:
        """Whether losses wait on a late device, so that weights there are not looked at either."""
        return bool(self._held)

    def takes_on_trust(self) -> bool:
        """Whether nothing can be known now, in a step of which little is noted: its loss is kept on a late device."""
        if not self._held or self._pending or self._bad_losses:
            return False
        self._steps += 1
        return True

    def _read_later(self, kind: str) -> None:
        """Have all losses that are kept on the device copied at once."""
        device = late.devices[kind]
        held, self._held = self._held, []
        first = held[0][0]
        held = [(loss, call) for loss, call in held if loss.device == first.device and loss.dtype is first.dtype]
        if not held or not device.may_work():
            return
        if self._many is None or self._many[0].dtype is not first.dtype:
            self._many = device.places(_HELD, first.dtype)
        host, event = self._many
        device.arrange_many(
            host, event, torch.stack([loss if loss.dim() == 0 else loss.reshape(()) for loss, _ in held])
        )
        self._under_way = [call for _, call in held]

    def _look(self, root: torch.Tensor, size: int, key: Any) -> None:
        if size != 1:
            self._last_is_bad |= _is_bad(root)
        else:
            unscaled = self._unscaled
            is_scaled = unscaled is not None and unscaled[0]() is root
            loss = unscaled[1] if unscaled is not None and is_scaled else float(root.item())
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

    def _copy_later(self, root: torch.Tensor, kind: str, key: Any, frame: FrameType) -> None:
        device = late.devices[kind]
        self._is_good = False
        if not device.may_work():
            return
        if self._held:
            self._read_later(kind)
        # Pinned memory that is handed back and forth costs a hundred microseconds a step: some places are kept.
        self._place = (self._place + 1) % _PLACES
        where = (self._place, root.dtype)
        place = self._places.get(where)
        if place is None:
            place = self._places[where] = device.place(root.dtype)
        host, event = place
        device.arrange(host, event, root.detach())
        self._examiner.mark("backward")
        if len(self._pending) >= _PLACES:
            del self._pending[0]  # nobody has stepped for long; its place is needed
        self._pending.append((key, host, event, self._pasts.record(frame, self._steps)))

    def backward_ended(self, frame: FrameType, clock: Optimizers, stepping: Any) -> None:
        """Backward is over.

        Args:
            frame: Somewhere below the user's call.
            clock: Knows the optimizers that there are.
            stepping: The optimizer whose step is under way: backward was called by a closure.
        """
        has_optimizers = clock.optimizer_count > 0
        if not self._last_is_bad and stepping is None and has_optimizers:
            return  # nearly always; the gradients are looked at when they are used
        if self._last_is_bad:
            self._witness = _witness(clock.optimizers)
        used = stepping is not None or (self._steps == 0 and (not has_optimizers or self._backwards > 2))
        if self._last_is_bad and self._unscaled is None:
            if self._finding is None and (used or self._examined < _EXAMINED_AHEAD):
                self._examined += 1
                self._finding = self._examiner.examine(stepping, frame, "loss", "backward")
            if used and self._finding is not None:
                self._publish(self._finding)
        elif not has_optimizers and self._pending:
            self._look_back(frame)
        elif stepping is not None and _may_be_read(stepping) and self._any_bad(_gradients(stepping)):
            self._publish(self._examiner.examine(stepping, frame, "gradient", "backward"))
        elif not has_optimizers and self._has_time and self._any_bad(_leaf_gradients(self._roots)):
            # Nobody will step: the loop updates its weights by hand.
            self._publish(self._examiner.examine(None, frame, "gradient", "backward"))

    def _look_back(self, frame: FrameType) -> None:
        """Nobody will step, and the device is read late: look at the losses that have arrived by now."""
        while self._pending and self._pending[0][2].query():
            arrived, self._pending = self._pending[:1], self._pending[1:]
            rest, self._pending = self._pending, arrived
            self._settle_pending(frame)
            self._pending = rest
            if self._last_is_bad:
                self._publish(self._examiner.examine(None, frame, "loss", "backward"))
                return

    def cleared(self) -> None:
        """The gradients of what was suspected are gone."""
        self._bad_losses = 0
        self._finding = None
        self._pending.clear()

    # The gradients

    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        """The weights are about to be touched: the last moment at which the step can be replayed as it was."""
        kind = _kind_of_device(optimizer)
        is_late = kind in late.devices
        if is_late and not late.devices[kind].may_work():
            return  # a graph is being captured: this is no step yet
        self._settle_pending(frame)
        if not self.on:
            return
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self.born_bad |= _all_bad(_with_gradient(optimizer), at_once=is_late)
        self._steps += 1
        self.skipped = self._skipped_bad = 0
        suspect, finding = self._bad_losses > 0, self._finding
        kept = self._last_is_bad or _is_there(self._witness)
        self.cleared()
        if not _finite_rates(optimizer):
            self._publish(self._examiner.examine(optimizer, frame, "rate", "step"))
        elif suspect:
            if kept or any(_is_bad(gradient) for gradient in _gradients(optimizer)):
                self._publish(finding or self._examiner.examine(optimizer, frame, "loss", "step"))
        elif is_late:
            self._examiner.mark("update")
            if self._is_good:
                self._rewind.offer(optimizer, *self._examiner.usual_step())
        elif kind == "cpu" and (self._any_bad(_gradients(optimizer)) if self._is_due() else _first_is_bad(optimizer)):
            self._publish(self._examiner.examine(optimizer, frame, "gradient", "step"))

    def step_ended(self, optimizer: Any, frame: FrameType) -> None:
        """The weights have been touched, with gradients that were looked at."""
        if not _may_be_read(optimizer) or (not self._has_time and self._steps % _REST):
            return
        weights = [tensor for tensor in _with_gradient(optimizer) if id(tensor) not in self.born_bad]
        if self._any_bad(weights):
            self._publish(self._examiner.examine(optimizer, frame, "update", "update"))

    def step_skipped(self, scaler: Any, optimizer: Any, frame: FrameType) -> None:
        """GradScaler found infinities among the gradients and left the weights alone. Now and then that is normal."""
        self._settle_pending(frame)
        self.skipped += 1
        self._skipped_bad = self._skipped_bad + 1 if self._last_is_bad else 0
        self.cleared()
        if self._skipped_bad >= _SKIPPED_BAD:
            self._publish(self._examiner.examine(optimizer, frame, "loss", "step"))
        elif self.skipped >= _SKIPPED:
            self.lowest_scale = float(scaler.get_scale())
            self._publish(self._examiner.examine(optimizer, frame, "scale", "step"))

    def _settle_pending(self, frame: FrameType) -> None:
        """Read the losses that were copied."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        try:
            if not pending[-1][2].query():
                pending[-1][2].synchronize()  # recorded before backward: what is waited for is long done
            losses = [float(host.item()) for _, host, _, _ in pending]
        except Exception as error:
            if not late.is_device_error(error):
                raise
            self.device_failed(error, frame)
            return
        self._is_good = True
        self._settle_held()
        for loss, (key, _, _, call) in zip(losses, pending, strict=True):
            self._note_loss(loss, key)
            call.loss = loss
            self._last_is_bad = not math.isfinite(loss)
            if self._last_is_bad:
                self._bad_losses += 1
                self._is_good = False
                self.bad_call = self.bad_call or call

    def _settle_held(self) -> None:
        """The losses that were copied at once: they are older than the one that has arrived, and so have they."""
        if not self._under_way or self._many is None:
            return
        calls, self._under_way = self._under_way, []
        for loss, call in zip(self._many[0][: len(calls)].tolist(), calls, strict=True):
            call.loss = loss
            self._note_loss(loss, self.last_key)
            # What counts is where the bad ones began that go on to the present; others were dropped by the script.
            self.bad_call = (self.bad_call or call) if not math.isfinite(loss) else None

    def device_failed(self, error: BaseException, frame: FrameType) -> None:
        """The device is lost: say so once, and ask it for nothing more."""
        self.on = False
        if not late.is_dead():
            late.died(self._places, self._pending, self._rewind.originals())
            self._examiner.device_died(error, frame)

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


def _kind_of_device(optimizer: Any) -> str:
    """Where the weights are; told by the first of them."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            return "cpu" if tensor.is_cpu else str(tensor.device.type)
    return ""


def _may_be_read(optimizer: Any) -> bool:
    """Whether its values can be looked at without waiting."""
    kind = _kind_of_device(optimizer)
    return kind == "cpu" and kind not in late.devices


def _all_bad(tensors: list[torch.Tensor], *, at_once: bool) -> set[int]:
    """The identities of the tensors that are not finite.

    Args:
        tensors: With gradients, about to be updated for the first time.
        at_once: Whether to wait for the device once and not for each of them.
    """
    if at_once and tensors:
        where = tensors[0].device
        sums = torch.stack([tensor.detach().abs().sum().to(where, torch.float64) for tensor in tensors]).tolist()
        tensors = [tensor for tensor, total in zip(tensors, sums, strict=True) if not math.isfinite(total)]
    return {id(tensor) for tensor in tensors if _is_bad(tensor)}


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
    pending = [root.grad_fn for reference in roots if (root := reference()) is not None and root.is_cpu]
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
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.numel() == 1:
        value = tensor.item()
        return not (math.isfinite(value) if isinstance(value, int | float) else math.isfinite(abs(value)))
    # One reduction: a sum is finite only if every element is. An overflow of the sum itself is looked at again.
    total = tensor.sum().item()
    if math.isfinite(total if isinstance(total, float) else abs(total)):
        return False
    return not bool(torch.isfinite(tensor).all().item())
