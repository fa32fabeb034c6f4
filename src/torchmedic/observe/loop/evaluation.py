"""Dropout that stays on in evaluation mode, watched for in the first forward passes of a validation.

`F.dropout(x, p)` is on unless it is told `training=False`, and `scaled_dot_product_attention` drops whatever it is told
to. Neither knows the mode of the model. Whatever drops draws random numbers: only if a pass in evaluation mode without
gradients is followed by another random state, these functions are replaced for the next such pass, by ones that note
the user's line if they drop something. They are put back when the pass ends.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torchmedic.contained import contained
from torchmedic.observe.exchanged import Exchanged
from torchmedic.source.spots import Place
from torchmedic.source.user_code import is_user_file

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"
_MAX_PASSES = 3


class Dropped(NamedTuple):
    """A call that dropped something in evaluation mode."""

    place: Place
    name: str
    share: float


class _NotingFunction:
    """Stands for a function of torch's during one pass. If it is kept by somebody, it is pickled as the original."""

    def __init__(self, name: str, original: Callable[..., Any], note: Callable[..., None]) -> None:
        functools.update_wrapper(self, original)
        self._name = name
        self._original = original
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note(self._name, args, kwargs, sys._getframe(1))
        return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        import pydoc  # 3 ms that nobody else needs

        return pydoc.locate, (f"{F.__name__}.{self._name}",)


class _EndOfFrame:
    """Lies among the variables of a frame, and tells when the frame is gone."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def __del__(self) -> None:
        self._tell()


class Evaluation:
    """Fed by the ledger: it is armed for one forward pass at a time."""

    def __init__(self) -> None:
        self.armed = False
        self.refused = False  # compiled code is about
        self.dropped: dict[Place, Dropped] = {}
        self._passes = 0
        self._random_state: _RandomState | None = None  # at the beginning of the last pass
        self._draws = False  # a pass was seen to draw random numbers, or something behind it
        self._trained: set[int] = set()  # identities of models
        self._patches = Exchanged()

    def forward(self, model: torch.nn.Module, frame: FrameType) -> None:
        """A forward pass of a model begins in the frame of its call."""
        if model.training:
            self._trained.add(id(model))
        elif (
            id(model) in self._trained
            and not torch.is_grad_enabled()
            and self._passes < _MAX_PASSES
            and not self.refused
        ):
            if self._draws:
                self._passes += 1
                self._arm(frame)
            else:
                self._random_state = _random_state()

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way that is looked at."""
        return self.armed or self._random_state is not None

    def refuse(self) -> None:
        self.refused = True
        self.disarm()

    def _arm(self, frame: FrameType) -> None:
        self.armed = True
        note = contained("observe.habits")(self._note)
        for name in (*_DROPOUTS, _ATTENTION):
            self._patches.put(F, name, _NotingFunction(name, getattr(F, name), note))
        frame.f_locals["__torchmedic_end__"] = _EndOfFrame(contained("observe.habits")(self.disarm))

    def disarm(self) -> None:
        """Something else happens: the pass is over."""
        if self._random_state is not None:
            self._draws = self._random_state != _random_state()
            self._random_state = None
        self.armed = False
        self._patches.take_back()

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        if torch.is_grad_enabled():
            self.disarm()  # another pass has begun, without a word
            return
        if not is_user_file(frame.f_code.co_filename):
            return  # a layer of torch's, which knows its mode
        if name == _ATTENTION:
            share = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        elif len(args) > 2 or "training" in kwargs:
            return  # it was told
        else:
            share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if isinstance(share, float | int) and share > 0:
            place = Place(frame.f_code.co_filename, frame.f_lineno)
            self.dropped[place] = Dropped(place, name, float(share))


_RandomState = tuple[bytes, tuple[int, ...]]


def _random_state() -> _RandomState:
    """The state of the generators of the CPU and of the devices."""
    on_devices = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    offsets = (generator.get_offset() for generator in torch.cuda.default_generators) if on_devices else ()
    return torch.default_generator.get_state().numpy().tobytes(), tuple(offsets)
