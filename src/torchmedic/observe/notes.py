"""Notes for a later replay: which frames were on the stack at the forward pass, and the state at the start of a step.

Notes hold numbers, code objects and RNG states; never a frame, never a big tensor. A frame is recognised later by its
identity and its code, which is safe because only frames that are still alive are ever compared.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

_DEPTH = 80


class StepNotes:
    """What the current step needs to be replayed; renewed when a step begins."""

    def __init__(self) -> None:
        self.forward: dict[int, tuple[CodeType, int]] = {}
        self.rng: torch.Tensor | None = None
        self.device_rng: list[torch.Tensor] = []
        self.sequence_number = 0
        self.grad_enabled = True
        self.autocast: dict[str, torch.dtype] = {}
        self.carried: dict[str, Any] = {}
        self.carried_frame = 0
        self._carried_names: dict[tuple[CodeType, int], frozenset[str]] = {}

    def step_begins(self, frame: FrameType | None) -> None:
        """Batch loaded or weights updated: what follows is what a replay will run again."""
        self.rng = torch.get_rng_state()
        # As `torch.cuda.get_rng_state_all` does, without what it checks every time.
        self.device_rng = (
            [generator.get_state() for generator in torch.cuda.default_generators]
            if torch.cuda.is_initialized()
            else []
        )
        self.sequence_number = _get_sequence_nr()
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }
        self._note_carried(frame)

    def is_fresh(self) -> bool:
        """Whether nothing that could be differentiated has happened since the step began."""
        return self.rng is None or _get_sequence_nr() == self.sequence_number

    def forward_begins(self, frame: FrameType | None) -> None:
        """A root module is called: remember everybody on the stack."""
        noted: dict[int, tuple[CodeType, int]] = {}
        while frame is not None and len(noted) < _DEPTH:
            noted[id(frame)] = (frame.f_code, frame.f_lineno)
            frame = frame.f_back
        self.forward = noted

    def _note_carried(self, frame: FrameType | None) -> None:
        """Keep the values that the step may overwrite and that the next one starts from (a hidden state, say)."""
        self.carried = {}
        if frame is None or sys.gettrace() is not None:
            return
        key = (frame.f_code, frame.f_lineno)
        names = self._carried_names.get(key)
        if names is None:
            # Named as text because imports point one way; asked once per place in the code.
            segment = importlib.import_module("torchmedic.replay.segment")
            names = segment.carried_names(frame, frame.f_lineno)
            if sys.version_info < (3, 13) and not {"locals", "vars"}.isdisjoint(frame.f_code.co_names):
                names = frozenset()  # there is one dict of locals per frame: reading it here would change the user's
            self._carried_names[key] = names
        if not names:
            return
        values = frame.f_locals
        self.carried = {name: held(values[name]) for name in names if name in values}
        self.carried_frame = id(frame)
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            # A function's: before 3.13 a copy kept by the frame. Left alone, it would hold every local past its time.
            values.clear()


_SMALL = 1 << 20


def held(value: Any) -> Any:
    """A value to go back to. Big tensors are held weakly: notes must not keep them alive."""
    if isinstance(value, torch.Tensor):
        return value if value.nbytes <= _SMALL else weakref.ref(value)
    if isinstance(value, tuple | list) and len(value) <= 8:
        return type(value)(held(item) for item in value) if type(value) in (tuple, list) else value
    return value


def released(value: Any) -> Any:
    """What `held` kept; None stands for a tensor that is gone."""
    if isinstance(value, weakref.ref):
        return value()
    if type(value) in (tuple, list):
        return type(value)(released(item) for item in value)
    return value
