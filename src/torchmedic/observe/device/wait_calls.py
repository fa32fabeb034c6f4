"""The calls that may make the host wait for a device, replaced for a few steps by ones that say so."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from torchmedic.contained import contained
from torchmedic.observe.exchanged import Exchanged
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.user_code import PACKAGE, is_user_file, outside_torch

# Not `__getitem__`: a class of Python's that has one is a sequence to C code, for good. `torch.tensor` would take a
# list of tensors apart, and fail on the numbers in them.
_METHODS = (
    "item tolist cpu cuda to numpy nonzero masked_select unique copy_ __float__ __int__ __bool__ __index__ __repr__ "
    "__format__ __contains__ __setitem__"
).split()
_FUNCTIONS = "nonzero masked_select unique equal allclose tensor as_tensor".split()
# Files of torch through which the user's own call of a method goes.
_THIN = ("_tensor.py", "_tensor_str.py", "functional.py", "streams.py", f"cuda{os.sep}__init__.py")


class Listener(Protocol):
    """Receives the calls."""

    def begins(self, site: int, frame: FrameType, name: str, *, uploads: bool) -> bool: ...

    def ended(self) -> None: ...


class WaitCalls:
    """Patches the waiting calls of torch while it is armed."""

    def __init__(self, listener: Listener) -> None:
        self._begins = contained("observe.checkup")(listener.begins)
        self._ended = contained("observe.checkup")(listener.ended)
        self.armed = False
        self._patches = Exchanged()

    def arm(self) -> None:
        if self.armed:
            return
        self.armed = True
        for name in _METHODS:
            self._put(torch.Tensor, name)
        for name in _FUNCTIONS:
            self._put(torch, name)
        self._put(torch.cuda, "synchronize")
        self._put(torch.cuda.Stream, "synchronize")
        self._put(torch.cuda.Event, "synchronize")

    def disarm(self) -> None:
        self.armed = False
        self._patches.take_back()

    def _put(self, owner: Any, name: str) -> None:
        self._patches.put(owner, name, self._around(getattr(owner, name), name))

    def _around(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        begins, ended = self._begins, self._ended

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(PACKAGE):
                return original(*args, **kwargs)
            # By its line: the instruction that a frame is at changes when Python has specialised it.
            site = hash((id(frame.f_code), frame.f_lineno, name))
            if not begins(site, frame, name, uploads=_uploads(name, args)):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                ended()

        return call


def place_of(frame: FrameType) -> Place:
    """The line that called, if it is the user's own and not a library's."""
    outer = outside_torch(frame)
    inner: FrameType | None = frame
    while inner is not None and inner is not outer:
        if not inner.f_code.co_filename.endswith(_THIN):
            return NOWHERE
        inner = inner.f_back
    if outer is None or not is_user_file(outer.f_code.co_filename):
        return NOWHERE
    return Place(outer.f_code.co_filename, outer.f_lineno)


def _uploads(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call brings data from the host to a device, rather than back."""
    if name in ("tensor", "as_tensor"):
        return True
    is_on_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_cpu
    return (name in ("to", "cuda") and is_on_host) or (name == "copy_" and not is_on_host)
