"""The most memory that a step has at once, counted on fake tensors: what it makes, from its birth to its death.

The count is of what the step itself makes; what was there before it (parameters, the state of an optimizer that has
stepped, other tensors) is whoever asks to add. Gradients count from the moment at which backward makes them, and the
state of an optimizer from its first step. Kernels may have work space of their own that no operation shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchmedic.evidence.memory.fake.ledger import ByteLedger, Place
from torchmedic.replay.fake.births import Births, Course
from torchmedic.replay.fake.recurrent import answer, answers

_BLOCKS = {"cuda": 512, "cpu": 64}  # bytes that an allocator rounds up to
_DEVICE = torch.ops.prim.device.default
FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer"  # phases of a step


class LiveBytes:
    """Bytes that are alive now, and the most that were alive at once in each phase."""

    def __init__(self, wanted: Callable[[torch.device], bool] | None = None) -> None:
        self.now = 0
        self.phase = FORWARD
        self.by_phase: dict[str, int] = {}
        self._wanted = wanted
        self._births = Births(Course([], []), self._died)

    @property
    def course(self) -> Course:
        """The course so far."""
        return Course(*(each[:] for each in self._births.written))

    def reach(self, now: int, phase: str) -> None:
        """Note that so many bytes are alive for a moment."""
        if now > self.by_phase.get(phase, 0):
            self.by_phase[phase] = now

    def born(self, tensor: torch.Tensor, phase: str | None = None) -> None:
        """Count the storage of a tensor until it dies."""
        if self._wanted is not None and not self._wanted(tensor.device):
            return
        if self._births.number_of(tensor) is not None:
            return
        size = rounded(tensor.untyped_storage().nbytes(), tensor.device.type)
        self._births.follow(tensor, size)
        self.now += size
        self.reach(self.now, phase or self.phase)

    def _died(self, number: int) -> None:
        self.now -= self._births.written.sizes[number]


Weigh = Callable[[float], float]


def highest(course: Course, weigh: Weigh | None = None) -> int:
    """The most bytes that are alive at once; `weigh` is for storages that take more than their size."""
    sizes: Sequence[float] = [weigh(size) for size in course.sizes] if weigh is not None else course.sizes
    now = most = 0.0
    for event in course.events:
        now += sizes[event] if event >= 0 else -sizes[~event]
        most = max(most, now)
    return int(most)


def rounded(nbytes: int, kind: str) -> int:
    """The bytes that an allocator takes for an allocation of so many."""
    block = _BLOCKS.get(kind, 1)
    return -(-nbytes // block) * block


class Fakes:
    """The fakes of what is there before a step, made once for all replays of it."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        # With the real ones, so that their identities stay their own.
        self.known: dict[int, tuple[torch.Tensor, Any]] = {}


class Counting(ByteLedger):
    """A ledger of a whole step that also follows what dies."""

    def __init__(self, fakes: Fakes, names: Mapping[int, str], deadline: float, live: LiveBytes) -> None:
        super().__init__(fakes.mode, names, deadline)
        self.live = live
        self.course: Course | None = None  # through backward
        self.has_half = False  # some result is in half precision already
        self.has_updated = False  # some optimizer has stepped
        self.new_state = 0  # bytes that optimizers have made and kept
        self._updating = False
        self._fakes = fakes.known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for several times by every operation
        if self._updating and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the count of steps: how large it is says nothing about bytes
        return super().__torch_dispatch__(func, types, args, kwargs)

    def appeared(self, value: torch.Tensor, place: Place, node: Any) -> None:
        self.live.born(value, BACKWARD if node is not None and not self._updating else None)
        self.has_half = self.has_half or value.dtype in (torch.bfloat16, torch.float16)

    def _carried_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        return answer(func, args, kwargs) if answers(func) else func(*args, **kwargs)

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        known = self._fakes.get(id(value))
        if known is None:
            known = self._fakes[id(value)] = (value, super()._faked(value))
        return known[1]

    def end_course(self) -> None:
        """End the course: the update of the weights and the end of the replay are no part of it."""
        self.course = self.course or self.live.course

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Count what is made inside as the step of an optimizer."""
        self.end_course()
        phase, self.live.phase = self.live.phase, UPDATE
        self._updating = self.has_updated = True
        try:
            yield
        finally:
            self.live.phase = phase
            self._updating = False
