"""Every operation of a replayed step, forward and backward, with the line of the user's code that it belongs to.

Seen from below autograd by a TorchDispatchMode. Per output one reduction (the largest magnitude, which is NaN or
infinite if any element is) stays on the device and is read once, when the replay is over. Tensors are not kept, so a
step that fits into memory still fits under the microscope; the few operations that turn out to matter are captured with
their values in a second pass, which finds them by their number because a replay is deterministic.
"""

from __future__ import annotations

import math
import sys
import time
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from torchmedic.observe.frames import is_user_file
from torchmedic.records import Location, Role
from torchmedic.replay.frames import place

_ENGINE = "_engine_run_backward"
_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})


class ReplayTooLong(Exception):
    """The replay has used up its time."""


class Spot(NamedTuple):
    """A place in the user's code, as Python gives it: bytes from 0."""

    file: str
    line: int
    column: int | None
    end_line: int | None
    end_column: int | None
    function: str

    def location(self, role: Role, label: str = "") -> Location:
        return place(role, self.file, self.line, label, self.column, self.end_column, self.end_line)


class Leaf(NamedTuple):
    """A tensor that the step found there: a parameter, a batch, a constant."""

    tensor: torch.Tensor
    magnitude: int


class Op:
    """One operation. `inputs` holds numbers of earlier operations, or leaves."""

    __slots__ = (
        "captured",
        "explicit",
        "forward",
        "index",
        "inputs",
        "magnitudes",
        "module",
        "name",
        "node",
        "spot",
        "writes",
        "written",
    )

    def __init__(self, index: int, name: str, spot: Spot | None, node: str) -> None:
        self.index = index
        self.name = name
        self.spot = spot
        self.node = node  # the autograd node that ran it; empty in the forward pass
        self.forward: int | None = None  # for a backward operation: the forward one that it differentiates
        self.inputs: list[int | Leaf] = []
        self.magnitudes: list[int] = []  # into Microscope.values
        self.explicit = False  # a non-finite constant was among its arguments
        self.writes = False
        self.written: tuple[int, ...] = ()  # storages
        self.module: torch.nn.Module | None = None  # for a write: the layer of torch's that made it
        self.captured: Captured | None = None

    @property
    def is_backward(self) -> bool:
        return bool(self.node)


class Captured(NamedTuple):
    """An operation with its values, kept in the second pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]


class Microscope(TorchDispatchMode):
    """Records the operations of one replay."""

    def __init__(self, *, capture: frozenset[int] = frozenset(), deadline: float | None = None) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.values: list[float] = []
        self._magnitudes: list[torch.Tensor] = []
        self._producer: dict[int, int] = {}
        self._leaves: dict[int, Leaf] = {}
        self._by_sequence: dict[int, int] = {}
        self._capture = capture
        self._deadline = deadline
        self._positions: dict[tuple[CodeType, int], tuple[int | None, ...]] = {}

    # What the analysis asks

    def magnitude(self, source: int | Leaf) -> float:
        """The largest magnitude of an operation's outputs, or of a leaf; NaN if any element is."""
        if isinstance(source, Leaf):
            return self.values[source.magnitude]
        found = [self.values[index] for index in self.ops[source].magnitudes]
        return max(found, key=lambda value: (math.isnan(value), value)) if found else 0.0

    def producer_of(self, tensor: torch.Tensor) -> int | Leaf | None:
        key = storage_of(tensor)
        if key is None:
            return None
        return self._producer.get(key, self._leaves.get(key))

    def spot_of(self, op: Op) -> Spot | None:
        """The line to show for an operation: for a backward one, that of the forward operation."""
        if op.is_backward and op.forward is not None:
            return self.ops[op.forward].spot or op.spot
        return op.spot

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ReplayTooLong
        index = len(self.ops)
        node = torch._C._current_autograd_node()
        spot, in_backward_code = self._spot(sys._getframe(1), node is not None)
        op = Op(index, func._schema.name.removeprefix("aten::"), spot, node.name() if node is not None else "")
        self.ops.append(op)
        if node is None:
            self._by_sequence.setdefault(_get_sequence_nr() - 1, index)
        elif not in_backward_code:
            op.forward = self._by_sequence.get(node._sequence_nr())
        sources: list[int] = []
        for value in tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._note_input(op, value, sources)
            elif isinstance(value, float) and not math.isfinite(value):
                op.explicit = True
        kept = _kept((args, kwargs)) if index in self._capture else None
        result = func(*args, **kwargs)
        outputs = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        op.writes = func._schema.is_mutable
        if op.writes:
            op.module = _layer(sys._getframe(1))
            written = _written(func, args, kwargs)
            op.written = tuple(key for tensor in written if (key := storage_of(tensor)) is not None)
            outputs = [*outputs, *written]
        for tensor in outputs:
            self._note_output(op, tensor, sources)
        if kept is not None:
            op.captured = Captured(kept[0], kept[1], [_copy(tensor) for tensor in outputs])
        return result

    def _note_input(self, op: Op, tensor: torch.Tensor, sources: list[int]) -> None:
        key = storage_of(tensor)
        if key is None:
            return
        sources.append(key)
        producer = self._producer.get(key)
        if producer is not None:
            op.inputs.append(producer)
            return
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._leaves[key] = Leaf(tensor, self._measure(tensor))
        op.inputs.append(leaf)

    def _note_output(self, op: Op, tensor: torch.Tensor, sources: list[int]) -> None:
        key = storage_of(tensor)
        if key is None:
            return
        if key in sources and not op.writes:
            return  # a view: the value is that of its base
        self._producer[key] = op.index
        if op.name.split(".")[0] not in _UNINITIALISED:
            measured = self._measure(tensor)
            if measured >= 0:
                op.magnitudes.append(measured)

    def _measure(self, tensor: torch.Tensor) -> int:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.is_meta:
            self._magnitudes.append(torch.zeros(()))
        else:
            with torch.no_grad():
                self._magnitudes.append(torch.linalg.vector_norm(tensor.detach(), math.inf))
        return len(self._magnitudes) - 1

    def _spot(self, frame: FrameType | None, backward: bool) -> tuple[Spot | None, bool]:
        """The innermost line of the user's code, and whether it runs inside the backward pass (a custom Function)."""
        below_engine = backward
        while frame is not None:
            code = frame.f_code
            if is_user_file(code.co_filename):
                return self._spot_at(frame, code), below_engine
            if code.co_name == _ENGINE:
                below_engine = False
            frame = frame.f_back
        return None, False

    def _spot_at(self, frame: FrameType, code: CodeType) -> Spot:
        key = (code, frame.f_lasti)
        found = self._positions.get(key)
        if found is None:
            positions = list(code.co_positions())
            at = frame.f_lasti // 2
            found = positions[at] if 0 <= at < len(positions) else (frame.f_lineno, None, None, None)
            self._positions[key] = found
        line, end_line, column, end_column = found
        return Spot(code.co_filename, line or frame.f_lineno, column, end_line, end_column, code.co_name)


def storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse, meta without storage, wrapper subclasses


def _layer(frame: FrameType | None) -> torch.nn.Module | None:
    """The layer below the user's innermost line that is running."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            return owner if isinstance(owner, torch.nn.Module) else None
        frame = frame.f_back
    return None


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation's schema says it writes to."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [item for item in tree_iter(value) if isinstance(item, torch.Tensor)]
    return written


_KEEP = 16_000_000  # elements: a captured tensor above this is described by its meta data only


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.numel() <= _KEEP else tensor.detach()


def _kept(arguments: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda value: _copy(value) if isinstance(value, torch.Tensor) else value, arguments)
