"""Runs operations: on the host for real where they are small, on the pretended device with fake tensors.

Parameters are fake from their birth, and so are large tensors of floating point numbers on the host: the script runs
without the memory that it would need. Small tensors of the host, and all that a dataset reads, keep their values.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.fit.answers import ANSWERS, foreach, passing_bytes
from torchmedic.fit.cards import Card
from torchmedic.fit.fake_device import DEVICE, FakeMode
from torchmedic.fit.recorder import Recorder
from torchmedic.fit.speed import Clock
from torchmedic.records.fit import NOWHERE, Kind, Line, Trace
from torchmedic.replay.fake.known_values import exchanged, host_result, remember, tensors_of
from torchmedic.source.user_code import PACKAGE, is_user_file

_MAX_REAL_BYTES = 1 << 20  # larger tensors of floating point numbers that are made on the host are fake
_MAX_REAL_INDEX_BYTES = 256 << 20  # the same for integers: samplers and datasets read their values
_DEVICE_OF = torch.ops.prim.device.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_ADD = torch.ops.aten.add.Tensor
_HOST = torch.device("cpu")
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_TORCH = str(torch.__file__).rpartition("__init__")[0]
_MAX_FRAMES = 200
_MATRIX_PRODUCTS = frozenset("mm addmm bmm baddbmm _scaled_mm addbmm".split())


class Where(NamedTuple):
    """The line outside torch and the line of the user that an operation was called from."""

    place: Line = NOWHERE
    user: Line = NOWHERE


class Ended(BaseException):
    """Nothing more is run. Not an Exception, so that no handler of the script takes it for an error."""


class TooLong(Ended):
    """The steps take longer than the limit."""


class Machine(TorchDispatchMode):
    """The dispatch mode that sees every operation of the script.

    Args:
        card: The pretended card.
        deadline: When to give up, by the monotonic clock.
        adopt: Whether tensors of the host count as tensors of the device: for scripts that never name a device, and
            for models that live on the host.
    """

    def __init__(self, card: Card, deadline: float, *, adopt: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.trace = Trace()
        self.recorder = Recorder(self.trace)
        self.fake = FakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.clock = Clock(card)
        self.adopt = adopt
        self.updating = False  # inside the step of an optimizer
        self.building = False  # a module moves its parameters
        self.last: Where = Where()
        self.ended: Ended | None = None
        self._card = card
        self._deadline = deadline
        self._sequences: dict[int, Where] = {}  # by the sequence number of an autograd node
        self._lines: dict[tuple[CodeType, int], Line] = {}
        self._workspaces: set[bool] = set()
        self._adopted: dict[int, tuple[Any, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With a wrapper around `__torch_dispatch__`, the caller's frame could not be told from the engine's.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        in_engine = frame.f_code is _ENGINE
        if func is _DEVICE_OF:
            # The engine would ask for a stream of the device. Told that tensors are on the host, it does not.
            return _HOST if in_engine else getattr(args[0], "fake_device", None) or args[0].device
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if self.ended is not None:
            raise self.ended  # a handler of the script has caught it
        if time.monotonic() > self._deadline:
            self.end(TooLong())
        tensors = tensors_of(args, kwargs)
        if kwargs.get("device") == _HOST and (in_engine or self._stays(tensors)):
            kwargs = {**kwargs, "device": DEVICE}
        if not any(isinstance(each, FakeTensor) for each in tensors) and not self._is_fake_factory(
            func, args, kwargs, tensors
        ):
            return func(*args, **kwargs)
        return self._run_fake(func, args, kwargs, tensors, frame, in_engine)

    def end(self, reason: Ended) -> NoReturn:
        """Run nothing more, from here on."""
        self.ended = reason
        raise reason

    def caller(self) -> Line:
        """The innermost line of the user that is running now."""
        return self._walk(sys._getframe(1)).user

    def fake_like(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """A fake tensor of the same shape, on the same device or on another."""
        with self.fake:
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
            )

    def adopted(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake on the device that stands for a tensor of the host for as long as this lives."""
        known = self._adopted.get(id(tensor))
        if known is not None:
            return known[1]
        made = self.fake_like(tensor.detach(), DEVICE)
        key = id(tensor)
        self._adopted[key] = (weakref.ref(tensor, lambda _: self._adopted.pop(key, None)), made)
        self.recorder.born(made, "batch", self.last.place, self.last.user)
        self._note_batch(made)
        return made

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Count what is copied to the device as parameters and buffers of a module."""
        before, self.building = self.building, True
        try:
            yield
        finally:
            self.building = before

    def _run_fake(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], frame: FrameType, in_engine: bool
    ) -> Any:
        node = torch._C._current_autograd_node()
        where = self._where(frame, node, in_engine)
        self.last = where
        known = host_result(func, args, kwargs)
        if isinstance(known, bool | int | float):
            return known
        if self.adopt:
            args, kwargs = self._adopt_all(args, kwargs, tensors)
        if in_engine and _adds_in_place(func, args):
            self.clock.ran(func, args, [args[0]], tensors)
            return args[0]
        result = self._carried_out(func, args, kwargs)
        remember(result, known)
        made = [each for each in tensors_of(result) if isinstance(each, FakeTensor) and each.fake_device == DEVICE]
        if made or any(isinstance(each, FakeTensor) and each.fake_device == DEVICE for each in tensors):
            self._count(func, args, made, tensors, where, node)
        return result

    def _carried_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        answer = ANSWERS.get(func) or foreach(func)
        with self.fake:
            if answer is not None:
                found = answer(self.trace, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            return func(*args, **kwargs)

    def _count(
        self, func: Any, args: Any, made: list[Any], tensors: list[torch.Tensor], where: Where, node: Any
    ) -> None:
        self.clock.ran(func, args, made, tensors)
        name = func._schema.name.removeprefix("aten::")
        kind = self._kind(func, tensors, where, node)
        if name in _MATRIX_PRODUCTS and (node is not None) not in self._workspaces:
            # Each thread that multiplies has a workspace of its own: that of the script, and that of backward.
            self._workspaces.add(node is not None)
            self.recorder.held(self._card.cublas_workspace, "workspaces of cuBLAS", *where)
        for each in made:
            if not self.recorder.knows(each):
                self.recorder.born(each, kind, *where)
                if kind == "batch":
                    self._note_batch(each)
            if each.dtype in (torch.bfloat16, torch.float16):
                self.trace.autocast = True
        passing = passing_bytes(name, args, self._card)
        if passing:
            self.recorder.passing(passing, kind, *where)

    def _kind(self, func: Any, tensors: list[torch.Tensor], where: Where, node: Any) -> Kind:
        if self.updating:
            return "temporaries of the optimizer"
        if self.building:
            return "parameters"
        if node is not None:
            return "temporaries of backward"
        from_host = all(each.device.type != "cuda" for each in tensors)
        if from_host and (not tensors or func in _COPIES):
            return "activations" if where.place.module else "batch"
        return "activations"

    def _note_batch(self, tensor: torch.Tensor) -> None:
        if tensor.dim() and tensor.numel() > 1:
            self.trace.batch.append(tuple(tensor.shape))

    def _is_fake_factory(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether an operation on no fake tensor gives one: on the device, or too large for the host."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return True
        if tensors:
            return False
        sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
        if not sizes or not all(isinstance(each, int) for each in sizes):
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        is_float = dtype.is_floating_point and "randint" not in func._schema.name
        limit = _MAX_REAL_BYTES if is_float else _MAX_REAL_INDEX_BYTES
        return math.prod(sizes) * dtype.itemsize > limit

    def _stays(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a tensor that is to go to the host stays, as the host counts as the device."""
        return self.adopt and any(isinstance(each, FakeTensor) and each.fake_device == DEVICE for each in tensors)

    def _adopt_all(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
        if not any(isinstance(each, FakeTensor) and each.fake_device == DEVICE for each in tensors):
            return args, kwargs

        def exchange(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or not value.dim():
                return value
            return self.adopted(value)

        return exchanged(args, kwargs, exchange)

    def _where(self, frame: FrameType | None, node: Any, in_engine: bool) -> Where:
        if in_engine and self.trace.backward_line.file:
            known = self._sequences.get(node._sequence_nr()) if node is not None else None
            if known is not None:
                return known
        found = self._walk(frame)
        if in_engine and not self.trace.backward_line.file:
            self.trace.backward_line = found.user
        if not in_engine and node is None:
            self._sequences[_get_sequence_nr() - 1] = found
        return found

    def _walk(self, frame: FrameType | None) -> Where:
        place: tuple[CodeType, int] | None = None
        module = ""
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            if not module and code.co_name == "forward" and code.co_argcount:
                owner = frame.f_locals.get(code.co_varnames[0])
                module = type(owner).__name__ if isinstance(owner, torch.nn.Module) else ""
            if not code.co_filename.startswith((_TORCH, PACKAGE, "<")):
                place = place or (code, frame.f_lineno)
                if is_user_file(code.co_filename):
                    return Where(self._line(*place, module), self._line(code, frame.f_lineno, ""))
            frame = frame.f_back
        return Where(self._line(*place, module) if place else NOWHERE, NOWHERE)

    def _line(self, code: CodeType, line: int, module: str) -> Line:
        if module:
            return Line(code.co_filename, line, module)
        known = self._lines.get((code, line))
        if known is None:
            known = self._lines[code, line] = Line(code.co_filename, line)
        return known


def _adds_in_place(func: Any, args: Any) -> bool:
    """Whether the engine adds up two gradients of one tensor.

    It adds them in place if nothing else refers to the first, but never does so with fake tensors.
    """
    if func is not _ADD or torch.is_grad_enabled() or not all(isinstance(each, FakeTensor) for each in args):
        return False
    one, two = args
    return bool(one.shape == two.shape and one.dtype == two.dtype and one._use_count() <= two._use_count())
