"""Dropout that stays on in evaluation mode, watched for in the first forward passes of a validation.

`F.dropout(x, p)` is on unless it is told `training=False`, and `scaled_dot_product_attention` drops whatever it is told
to. Neither knows of the mode of the model. For a pass in evaluation mode without gradients these functions are replaced
by ones that note the user's line if they drop something.
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
from torchmedic.source.spots import Place
from torchmedic.source.user_code import is_user_file

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"
_PASSES = 3


class Dropped(NamedTuple):
    """A call that dropped something in evaluation mode."""

    place: Place
    name: str
    share: float


class Evaluation:
    """Fed by the ledger: it is armed for one forward pass at a time."""

    def __init__(self) -> None:
        self.armed = False
        self.refused = False  # compiled code is about
        self.dropped: dict[Place, Dropped] = {}
        self._passes = 0
        self._trained: set[int] = set()  # identities of models
        self._undo: list[tuple[str, Any]] = []

    def forward(self, model: torch.nn.Module) -> None:
        """A forward pass of a model begins."""
        if model.training:
            self._trained.add(id(model))
        elif id(model) in self._trained and not torch.is_grad_enabled() and self._passes < _PASSES and not self.refused:
            self._passes += 1
            self._arm()

    def refuse(self) -> None:
        self.refused = True
        self.disarm()

    def _arm(self) -> None:
        self.armed = True
        for name in (*_DROPOUTS, _ATTENTION):
            original = getattr(F, name)
            self._undo.append((name, original))
            setattr(F, name, self._noting(name, original))

    def disarm(self) -> None:
        self.armed = False
        while self._undo:
            name, original = self._undo.pop()
            setattr(F, name, original)

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        note = contained("observe.habits")(self._note)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            note(name, args, kwargs, sys._getframe(1))
            return original(*args, **kwargs)

        return call

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
