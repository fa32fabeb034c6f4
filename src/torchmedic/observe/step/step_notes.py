"""Notes for a later replay: which frames were on the stack at the forward pass, and the state at the start of a step.

Notes hold numbers, code objects and RNG states; never a frame, never a big tensor. A frame is recognised later by its
identity and its code, which is safe because only frames that are still alive are ever compared.
"""

from __future__ import annotations

import inspect
import struct
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from torchmedic.observe.device import async_devices
from torchmedic.observe.step.tensors import PLAIN, is_array
from torchmedic.source.user_code import outside_torch
from torchmedic.source.user_variables import looks_at_locals

_MAX_FRAMES = 80
_PLACE_LENGTH = 9  # numbers that tell where a call comes from: three of its frame, two of each of three around it
_MARK = struct.Struct("<Qq")
_generator = torch.default_generator
_is_initialized: Callable[[], bool] = torch.cuda.is_initialized
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# The random state of a device, as far as it changes: its seed and how many numbers were drawn.
Mark = tuple[int, int]


def _device_marks() -> list[Mark]:
    if async_devices.device_is_lost() or torch.cuda.is_current_stream_capturing():
        return []
    return [(generator.initial_seed(), generator.get_offset()) for generator in torch.cuda.default_generators]


def device_states(marks: list[Mark]) -> list[torch.Tensor]:
    """The states that `torch.cuda.get_rng_state_all` would have given, at a tenth of the cost."""
    return [torch.frombuffer(bytearray(_MARK.pack(*mark)), dtype=torch.uint8) for mark in marks]


class StepNotes:
    """What the current step needs to be replayed; renewed when a step begins."""

    def __init__(self) -> None:
        # By the identity of a frame: its code and the instruction it was at. Lines are looked up when they are needed.
        self.forward_points: dict[int, tuple[CodeType, int]] = {}
        self.rng: torch.Tensor | None = None
        self.forward_rng: torch.Tensor | None = None  # in the first step: when its first module was called
        self._has_gone_forward = False
        self._forward_place: list[int] = []
        self.device_marks: list[Mark] = []
        self.sequence_number = 0
        self.grad_enabled = True
        self.autocast: dict[str, torch.dtype] = {}
        self.carried: dict[str, Any] = {}
        self.carried_frame = 0
        # By the identity of a code, which the value keeps alive: to hash a code takes longer than all the rest.
        self._carried_names: dict[tuple[int, int], tuple[CodeType, frozenset[str]]] = {}

    def step_begins(self, frame: FrameType | None) -> None:
        """A batch was loaded or the weights were updated: a replay will start here."""
        self.rng = _generator.get_state()
        if self._has_gone_forward:
            self.forward_rng = None
        self.device_marks = _device_marks() if _is_initialized() else []
        self.sequence_number = _get_sequence_nr()
        self.grad_enabled = _is_grad_enabled()
        # Always a new one: an earlier step may still hold the last.
        self.autocast = (
            {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
            if _is_any_autocast_enabled()
            else {}
        )
        self._note_carried(frame)

    @property
    def device_rng(self) -> list[torch.Tensor]:
        return device_states(self.device_marks)

    def optimizer_built(self) -> None:
        """The first step may begin here: nothing else tells before its forward pass."""
        if not self._has_gone_forward:
            self.step_begins(None)

    def step_is_over(self) -> None:
        """A step is over, and a hook will see the next one begin: the rest is noted then."""
        self.sequence_number = _get_sequence_nr()

    def forget(self) -> None:
        """A step begins that is sampled out: drop the notes of earlier steps, which would be wrong for it."""
        self.sequence_number = _get_sequence_nr()
        self.rng = None
        self.device_marks = []
        self.carried = {}
        self.carried_frame = 0

    def is_fresh(self) -> bool:
        """Whether nothing that could be differentiated has happened since the step began."""
        return self.rng is None or _get_sequence_nr() == self.sequence_number

    def forward_begins(self, frame: FrameType | None) -> None:
        """A root module is called: remember every frame on the stack."""
        if not self._has_gone_forward:
            # What the script does before its first step is not seen, and may draw random numbers.
            self._has_gone_forward = True
            self.forward_rng = _generator.get_state()
        frame = outside_torch(frame)
        if frame is None:
            self.forward_points = {}
            return
        # Frames that call from the same place as last time have the same frames around them.
        place = [id(frame), id(frame.f_code), frame.f_lasti]
        outer = frame.f_back
        while outer is not None and len(place) < _PLACE_LENGTH:
            place += (id(outer), outer.f_lasti)
            outer = outer.f_back
        if place == self._forward_place:
            return
        self._forward_place = place
        noted: dict[int, tuple[CodeType, int]] = {}
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            noted[id(frame)] = (frame.f_code, frame.f_lasti)
            frame = frame.f_back
        self.forward_points = noted

    @property
    def forward(self) -> dict[int, tuple[CodeType, int]]:
        """The code and the line at the forward pass of every frame, by the identity of the frame."""
        return {key: (code, line_of(code, lasti)) for key, (code, lasti) in self.forward_points.items()}

    def _note_carried(self, frame: FrameType | None) -> None:
        """Keep the values that a step overwrites and the next one starts from, a hidden state for example."""
        self.carried = {}
        if frame is None or sys.gettrace() is not None:
            return
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        found = self._carried_names.get(key)
        if found is not None:
            names = found[1]
        else:
            # Asked once per place in the code; most processes that import torch never get here.
            from torchmedic.source.segment.cut import carried_names

            names = carried_names(frame, frame.f_lineno)
            if sys.version_info < (3, 13) and looks_at_locals(frame.f_code):
                names = frozenset()  # there is one dict of locals per frame: reading it here would change the user's
            self._carried_names[key] = (code, names)
        if not names:
            return
        values = frame.f_locals
        self.carried = {name: held(values[name]) for name in names if name in values}
        self.carried_frame = id(frame)
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            # A function's: before 3.13 a copy kept by the frame. Left alone, it would hold every local past its time.
            values.clear()


def line_of(code: CodeType, lasti: int) -> int:
    """The line of an instruction; a frame's `f_lineno` is the same and is too slow to be asked at every step."""
    for start, end, line in code.co_lines():
        if start <= lasti < end:
            return line or code.co_firstlineno
    return code.co_firstlineno


_MAX_HELD_BYTES = 1 << 20  # bytes of a tensor that is held strongly
_MAX_COPIED_BYTES = 1 << 16  # bytes of an array, which is copied in every step


def held(value: Any) -> Any:
    """A value to go back to. Big tensors, models and optimizers are held weakly: notes must not keep them alive."""
    kind = type(value)  # `__class__` may be the user's code
    if issubclass(kind, torch.nn.Module | torch.optim.Optimizer):
        return weakref.ref(value)
    if issubclass(kind, torch.Tensor):
        # A sparse tensor does not know its bytes.
        small = kind in PLAIN and value.layout is torch.strided and value.nbytes <= _MAX_HELD_BYTES
        return value if small else weakref.ref(value)
    if kind in (tuple, list) and len(value) <= 8:
        return kind(held(item) for item in value)
    if is_array(kind):  # held itself, the user's could not be resized
        is_small = value.nbytes <= _MAX_COPIED_BYTES and not value.dtype.hasobject
        return value.copy() if is_small else weakref.ref(value)
    return value


def released(value: Any) -> Any:
    """What `held` kept; None stands for what is gone."""
    if isinstance(value, weakref.ref):
        return value()
    if type(value) in (tuple, list):
        return type(value)(released(item) for item in value)
    return value
