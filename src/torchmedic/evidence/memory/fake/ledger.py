"""What a step keeps, line by line, counted on fake tensors: shapes and bytes without memory.

A dispatch mode above `FakeTensorMode`. Real tensors (weights, batch) are exchanged for fakes at the first operation
that reads them and are never written to. Fakes are made of tensors that are there, on the device that these are on, so
that none is ever made of a device that this build of torch does not know.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.evidence.memory.accounting.saved_by_graph import applied_in, saving_line
from torchmedic.replay.fake.births import Births, Course
from torchmedic.replay.fake.known_values import exchanged, for_real, host_result, keeps_values, remember, tensors_of
from torchmedic.replay.isolation.sandbox import ReplayTooLong
from torchmedic.source.objects.graph import name_of
from torchmedic.source.spots import Spot, Spots
from torchmedic.source.user_code import PACKAGE, is_user_file

_BENEATH = ("<", PACKAGE, os.path.dirname(str(torch.__file__)) + os.sep, str(contextlib.__file__))

_REPLAY = "_execute_fake"  # the function that runs the statements of the step


class FailurePoint(Exception):
    """The replay has come to the operation that ran out of memory."""


class Place(NamedTuple):
    """A line of the user's, and the layer that was running."""

    spot: Spot | None
    module: str  # its path in the model; "" outside of one


class Saved(NamedTuple):
    """A tensor that a node keeps for backward, as the replay saw it."""

    nbytes: int
    shape: tuple[int, ...]
    sequence: int  # of the node, counted from the beginning of the step
    place: Place


class Made(NamedTuple):
    """The memory that an operation asked for."""

    nbytes: int
    shape: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    place: Place
    node: str = ""  # in backward


class ByteLedger(TorchDispatchMode):
    """Follows one fake replay.

    Args:
        fake: The mode that it lies above.
        names: The paths of modules by their identity.
        deadline: When to give up.
        stop: After how many nodes the real step failed; None to go on to the end.
        asked: The bytes that it asked for there.
        line: The user's file and line at which it did.
    """

    def __init__(
        self,
        fake: FakeTensorMode,
        names: Mapping[int, str],
        deadline: float,
        *,
        stop: int | None = None,
        asked: int | None = None,
        line: tuple[str, int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.saved: dict[int, Saved] = {}  # by the number of the birth
        self.failing: Made | None = None
        self.at_failure: list[tuple[int, Place]] = []  # what was still there when it came
        self.places: dict[int, Place] = {}  # by the number of a node, counted from the beginning
        self.made: list[Made] = []  # whatever is not small
        self._fake = fake
        self._names = names
        self._deadline = deadline
        self._stop = stop
        self._asked = asked
        self._line = line
        self._perhaps: Made | None = None  # as large and at that line, but a few nodes away
        # Fakes may take another way through an operation than the device did, and make a few nodes more or less.
        self._slack = max(2, stop // 40) if stop else 0
        self._start = _get_sequence_nr()
        self._births = Births(Course([], []))
        self._placed: list[tuple[int, Place]] = []  # bytes and place of every birth, by number
        self._spots = Spots()

    def begin(self) -> None:
        """The step begins here: nodes that were made before have no number."""
        self._start = _get_sequence_nr()

    @property
    def sequence(self) -> int:
        """How many nodes have been made since the beginning."""
        return _get_sequence_nr() - self._start

    def still_there(self) -> list[tuple[int, Place]]:
        """What the step has made and still has: bytes and places."""
        return [self._placed[number] for number in self._births.alive()]

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook for saved tensors, which changes nothing."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        number = self._births.number_of(tensor)
        if number is not None and number not in self.saved:
            nbytes = tensor.untyped_storage().nbytes()
            place = self._place(sys._getframe(1))
            self.saved[number] = Saved(nbytes, tuple(tensor.shape), self.sequence - 1, place)
        # As it is, a result would hold the node that holds it, and never be freed.
        return tensor.detach()

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_question(func):
            return func(*args, **kwargs)
        if time.monotonic() > self._deadline:
            raise ReplayTooLong
        node = torch._C._current_autograd_node()
        number = self.sequence
        if self._stop is not None and number > self._stop + self._slack and node is None:
            self.failing = self.failing or self._perhaps
            raise FailurePoint
        if keeps_values(func, args, kwargs):
            return for_real(func, args, kwargs)
        place = self._place(sys._getframe(1))
        if node is None:
            self.places.setdefault(number - 1, place)
        known = host_result(func, args, kwargs)
        if isinstance(known, bool | int):
            return known
        args, kwargs = exchanged(args, kwargs, self._faked)
        inputs = tensors_of(args, kwargs)
        given = {_key(value) for value in inputs}
        result = self._carried_out(func, args, kwargs)
        remember(result, known)
        for value in tensors_of(result):
            if isinstance(value, FakeTensor):
                self._note(value, given, place, node, inputs)
        return result

    def _carried_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._fake.from_tensor(value)
        return value

    def _note(self, value: FakeTensor, given: set[int], place: Place, node: Any, inputs: list[torch.Tensor]) -> None:
        if _key(value) in given or self._births.number_of(value) is not None:
            return
        nbytes = value.untyped_storage().nbytes()
        shapes = tuple(tuple(each.shape) for each in inputs)
        made = Made(nbytes, tuple(value.shape), shapes, place, name_of(node) if node is not None else "")
        if self._is_failure(made):
            self.failing = made
            self.at_failure = self.still_there()
            raise FailurePoint
        if made.nbytes > 1 << 20:
            self.made.append(made)
        self._births.follow(value, nbytes)
        self._placed.append((nbytes, place))
        self.appeared(value, place, node)

    def appeared(self, value: torch.Tensor, place: Place, node: Any) -> None:
        """Called when an operation has made new memory, for subclasses; `node` is given in backward."""

    def _is_failure(self, made: Made) -> bool:
        """Whether this is the operation that failed: equal bytes, line and number of nodes."""
        if self._asked is None or self.failing is not None or (made.node and self._stop is not None):
            return False
        spot = made.place.spot
        if not is_about(made.nbytes, self._asked) or (
            self._line is not None and (spot is None or (spot.file, spot.line) != self._line)
        ):
            return False
        if self._stop is None or self.sequence == self._stop:
            return True
        if self._perhaps is None and abs(self.sequence - self._stop) <= self._slack:
            self._perhaps = made
        return False

    def _place(self, frame: FrameType | None) -> Place:
        """The innermost line of the user's; where a library runs the whole loop, the innermost of a library."""
        module = ""
        library: Spot | None = None
        applied: Spot | None = None  # of a function of the user's that is saving
        while frame is not None:
            code = frame.f_code
            if code.co_name == "apply" and (kind := applied_in(frame.f_locals)) is not None:
                applied = applied or saving_line(kind)
            if code.co_name == _REPLAY and code.co_filename.startswith(PACKAGE):
                break  # what is above is not the step
            if not module and code.co_name == "forward":
                module = self._names.get(id(frame.f_locals.get("self")), "")
            if is_user_file(code.co_filename):
                if not module:
                    module = self._names.get(id(frame.f_locals.get("self")), "")
                return Place(applied or self._spots.at(frame), module)
            if library is None and not code.co_filename.startswith(_BENEATH):
                library = self._spots.at(frame)
            frame = frame.f_back
        return Place(library, module)


def _is_question(func: Any) -> bool:
    """Whether a fake is only asked which device it pretends to be on.

    C++ asks that where it cannot bear an exception: one that is raised here ends the process.
    """
    return getattr(func, "namespace", "") == "prim"


def is_about(nbytes: int, asked: int) -> bool:
    """Whether two sizes are equal up to the rounding of the allocator and of the message."""
    return abs(nbytes - asked) <= max(512, asked // 100)


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
