"""Every operation of a replayed step, forward and backward, with the line of the user's code that it belongs to.

Seen from below autograd by a TorchDispatchMode. Per tensor one reduction (the largest magnitude, which is NaN or
infinite if any element is) stays on the device and is read once, when the replay is over. Tensors are not kept, so a
step that fits into memory still fits under the microscope; the few operations that turn out to matter are captured with
their values in a second pass, which finds them by their number because a replay is deterministic.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from torchmedic.replay.isolation.sandbox import ReplayTooLong
from torchmedic.replay.trace.operations import Captured, Leaf, Op, Value, dense, geometry_of, overlap, storage_of
from torchmedic.source.objects.graph import name_of
from torchmedic.source.spots import Spot, Spots
from torchmedic.source.user_code import is_user_file

# What a reader of a replay needs comes from here, wherever it is defined.
__all__ = ["Captured", "Leaf", "Microscope", "Op", "Spot", "Value", "storage_of", "written_by"]

_ENGINE = "_engine_run_backward"


class Microscope(TorchDispatchMode):
    """Records the operations of one replay.

    Args:
        capture: The numbers of the operations to keep with their values.
        deadline: When to give up.
        watch: Leaves whose gradients are looked at when the replay is over.
    """

    def __init__(
        self,
        *,
        capture: frozenset[int] = frozenset(),
        deadline: float | None = None,
        watch: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.ops: list[Op] = []
        self.values: list[float] = []
        self.gradients: list[tuple[torch.Tensor, Value]] = []
        self._watch = watch
        self._magnitudes: list[torch.Tensor] = []
        self._measured: dict[tuple[Any, ...], int] = {}
        self._history: dict[int, list[tuple[int, Value]]] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._leaves: dict[int, Leaf] = {}
        self._by_sequence: dict[tuple[int, int], int] = {}
        self._capture = capture
        self._deadline = deadline
        self._spots = Spots()
        self._thread = threading.get_ident()

    # What the analysis asks

    def magnitude(self, value: Value) -> float:
        """The largest magnitude in a tensor; NaN if any element is."""
        return self.values[value.magnitude] if value.magnitude >= 0 else 0.0

    def value_of(self, tensor: torch.Tensor) -> Value:
        """A tensor as it is now, to be followed back from; before `read`."""
        return self._note(tensor, len(self.ops))

    def source(self, value: Value, is_bad: Callable[[float], bool] | None = None) -> int | Leaf | None:
        """What put a value there: the last operation that wrote to it, or the leaf that it is.

        Args:
            value: What was read.
            is_bad: Whether a magnitude is of the kind that is looked for: then the write that brought it in.
        """
        last: int | None = None
        for index, written in reversed(self._history.get(value.storage, ())[: value.writes]):
            if not overlap(written.geometry, value.geometry):
                continue
            last = index if last is None else last
            if is_bad is None or is_bad(self.magnitude(written)) or self.ops[index].is_uninitialised:
                return index
        leaf = self._leaves.get(value.storage)
        return leaf if leaf is not None else last

    def readers_of(self, op: Op) -> list[Op]:
        """The operations that were given what an operation made, in order."""
        made = {value.storage for value in op.outputs}
        return [
            later
            for later in self.ops[op.index + 1 :]
            if any(value.storage in made and self.source(value) == op.index for value in later.inputs)
        ]

    def spot_of(self, op: Op) -> Spot | None:
        """The line to show for an operation: for a backward one, that of the forward operation."""
        return self.forward_of(op).spot or op.spot

    def forward_of(self, op: Op) -> Op:
        """The operation itself, or for a backward one the forward operation that it differentiates."""
        for _ in range(4):  # a gradient of a gradient
            if op.forward is None:
                break
            op = self.ops[op.forward]
        return op

    def op_of(self, node: Any) -> Op | None:
        """The forward operation around which a node of the graph was built."""
        index = self._by_sequence.get((self._thread, node._sequence_nr()))
        return self.ops[index] if index is not None and _same_operation(name_of(node), self.ops[index].kind) else None

    def read(self) -> None:
        """Fetch all magnitudes at once: the only wait for the device."""
        if len(self.values) == len(self._magnitudes):
            return
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(self._magnitudes):
            by_device.setdefault(tensor.device, []).append(index)
        self.values = [0.0] * len(self._magnitudes)
        for indices in by_device.values():
            stacked = torch.stack([self._magnitudes[index].double() for index in indices]).tolist()
            for index, value in zip(indices, stacked, strict=True):
                self.values[index] = value

    # What torch calls

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call,unused-ignore]
        # The last moment at which the gradients of this replay are there.
        for tensor in self._watch:
            if tensor.is_leaf and tensor.grad is not None:
                self.gradients.append((tensor, self.value_of(tensor.grad)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ReplayTooLong
        index = len(self.ops)
        node = torch._C._current_autograd_node()
        spot, in_backward_code = self._spot(sys._getframe(1), node is not None)
        op = Op(index, func._schema.name.removeprefix("aten::"), spot, name_of(node) if node is not None else "")
        self.ops.append(op)
        # The node that is being built around this operation has the last number that was given out.
        self._by_sequence.setdefault((threading.get_ident(), _get_sequence_nr() - 1), index)
        if node is not None and not in_backward_code:
            op.derived = True
            op.forward = self._differentiated(op, node)
        unread = _only_written(func, args, kwargs)
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and not any(value is one for one in unread):
                op.inputs.append(self._note(value, index))
            elif isinstance(value, float) and not math.isfinite(value):
                op.explicit = True
        kept = _kept((args, kwargs)) if index in self._capture else None
        result = func(*args, **kwargs)
        outputs = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        op.writes = func._schema.is_mutable
        if op.writes:
            op.module = _layer(sys._getframe(1))
            written = written_by(func, args, kwargs)
            op.written = tuple(key for tensor in written if (key := storage_of(tensor)) is not None)
            outputs = [*(tensor for tensor in outputs if all(tensor is not other for other in written)), *written]
        given = {value.storage for value in op.inputs}
        for tensor in outputs:
            self._note_output(op, tensor, given)
        if kept is not None:
            op.captured = Captured(func, kept[0], kept[1], [_copy(tensor) for tensor in outputs])
        return result

    def _differentiated(self, op: Op, node: Any) -> int | None:
        """The operation around which a node was built; nodes are numbered per thread."""
        threads = dict.fromkeys((self._thread, threading.get_ident()))
        number = node._sequence_nr()
        found = [index for thread in threads if (index := self._by_sequence.get((thread, number))) is not None]
        fitting = [index for index in found if _same_operation(op.node, self.ops[index].kind) and index != op.index]
        return next(iter(fitting or [index for index in found if index != op.index]), None)

    def _note(self, tensor: torch.Tensor, reader: int) -> Value:
        key = storage_of(tensor)
        if key is None:
            return Value(0, (0, (), ()), -1, 0)
        writes = len(self._history.get(key, ()))
        if key not in self._alive:
            self._hold(key, tensor)
            self._leaves[key] = Leaf(tensor, reader)
        geometry = geometry_of(tensor)
        seen = (key, geometry, writes, tensor.dtype)
        magnitude = self._measured.get(seen)
        if magnitude is None:
            magnitude = self._measured[seen] = self._measure(tensor)
        return Value(key, geometry, magnitude, writes)

    def _note_output(self, op: Op, tensor: torch.Tensor, given: set[int]) -> None:
        key = storage_of(tensor)
        if key is None:
            return
        if key in given and not op.writes:
            return  # a view: the value is that of its base
        self._hold(key, tensor)
        history = self._history.setdefault(key, [])
        geometry = geometry_of(tensor)
        magnitude = -1 if op.is_uninitialised else self._measure(tensor)
        if magnitude >= 0:
            self._measured[key, geometry, len(history) + 1, tensor.dtype] = magnitude
        value = Value(key, geometry, magnitude, len(history) + 1)
        history.append((op.index, value))
        op.outputs.append(value)

    def _hold(self, key: int, tensor: torch.Tensor) -> None:
        """Keep the address of a storage, not its memory, from being given to another one."""
        if key not in self._alive:
            self._alive[key] = StorageWeakRef(dense(tensor).untyped_storage())

    def _measure(self, tensor: torch.Tensor) -> int:
        tensor = dense(tensor)
        measured = None
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() and not tensor.is_meta:
            try:
                with torch.no_grad():
                    measured = torch.linalg.vector_norm(tensor.detach(), math.inf)
            except (RuntimeError, NotImplementedError):
                measured = None  # eight-bit floats and the like
        self._magnitudes.append(_ZERO if measured is None else measured)
        return len(self._magnitudes) - 1

    def _spot(self, frame: FrameType | None, backward: bool) -> tuple[Spot | None, bool]:
        """The innermost line of the user's code, and whether it runs inside the backward pass (a custom Function)."""
        below_engine = backward
        while frame is not None:
            code = frame.f_code
            if is_user_file(code.co_filename):
                return self._spots.at(frame), below_engine
            if code.co_name == _ENGINE:
                below_engine = False
            frame = frame.f_back
        return None, False


_ZERO = torch.zeros((), device="cpu")


def _only_written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The running statistics of a batch normalisation that is in training mode: it does not read them."""
    if "batch_norm" not in func._schema.name:
        return []
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("training", given.get("train", True)):
        return []
    return [given[name] for name in ("running_mean", "running_var") if given.get(name) is not None]


def _same_operation(node: str, kind: str) -> bool:
    """Whether `LogSoftmaxBackward0` differentiates `log_softmax`."""
    wanted = node.partition("Backward")[0].lower()
    given = kind.replace("_", "")
    return bool(wanted) and (given.startswith(wanted) or wanted.startswith(given))


def _layer(frame: FrameType | None) -> torch.nn.Module | None:
    """The layer below the user's innermost line that is running."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            return owner if isinstance(owner, torch.nn.Module) else None
        frame = frame.f_back
    return None


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation's schema says it writes to."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [item for item in tree_iter(value) if isinstance(item, torch.Tensor)]
    return written


_MAX_ELEMENTS = 16_000_000  # of a captured tensor that is kept; a larger one is described by its meta data only


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.numel() <= _MAX_ELEMENTS else tensor.detach()


def _kept(arguments: Any) -> Any:
    return tree_map(lambda value: _copy(value) if isinstance(value, torch.Tensor) else value, arguments)
