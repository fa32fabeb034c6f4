"""What is exchanged on classes and modules of torch, and put back. Never on the user's objects, which get pickled.

Each patch calls torch's own function exactly once, with the same arguments, and passes on what it returns or raises.
Only what stands around that call is ours, and that is contained.

A wrapper is a frame between the caller and the method: a warning that counts frames then names a line of ours. So some
patches are descriptors that stand in a class in the place of the method. To look the method up runs their `__get__`,
which is over when the method begins, and the class itself still gives out the original function.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from itertools import repeat
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import torch.compiler

# Code of ours that torch.compile may come upon. Never compiled by itself; where it is inlined, `is_traced` is true.
entries: list[CodeType] = []

# `torch.compiler.is_compiling()` takes three times the instructions of `is_traced() or compiler._is_compiling_flag`.
# `is_traced` comes first: for torch.compile it is the constant True, so that compiled code has no guard on the flag.
compiler: Any = torch.compiler
is_traced = torch.compiler.is_dynamo_compiling
if not hasattr(compiler, "_is_compiling_flag"):  # a later torch
    is_traced, compiler = torch.compiler.is_compiling, SimpleNamespace(_is_compiling_flag=False)

_made: list[tuple[Any, str, Any]] = []


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    patch = around(original)
    _made.append((owner, name, original))
    leave_to_python(patch)
    setattr(owner, name, patch)


def leave_to_python(function: Callable[..., Any]) -> None:
    """Have a function of ours never compiled by itself; those that it calls may be."""
    if function.__code__ not in entries:
        entries.append(function.__code__)


def replace(owner: type, name: str, descriptor: Any) -> None:
    """Put a descriptor in the place of a method; it gives out the original where the class is asked."""
    _made.append((owner, name, owner.__dict__[name]))
    setattr(owner, name, descriptor)


def assign(owner: Any, name: str, patch: Any) -> None:
    """Put a patch that was made already under a second name."""
    _made.append((owner, name, getattr(owner, name)))
    setattr(owner, name, patch)


def without_our_frame(error: BaseException) -> None:
    """Take the frame of a patch out of a traceback. Called by the patch, which then raises the exception again.

    A bare `raise` adds no frame, so that the user's tracebacks are those of torch alone.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def notice(owner: Any, name: str, before: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
    """Call `before` with the arguments of each call of a function, two frames below the caller."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            before(args, kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                without_our_frame(error)
                raise

        return call

    wrap(owner, name, around)


def take_back() -> None:
    """Leave torch as it was."""
    for owner, name, original in reversed(_made):
        setattr(owner, name, original)
    _made.clear()


class NoticedCall:
    """Calls `before(owner, frame)` when the method is looked up on an object."""

    def __init__(self, original: Callable[..., Any], before: Callable[[Any, FrameType], None]) -> None:
        self._original = original
        self._before = before

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is not None and not (is_traced() or compiler._is_compiling_flag):
            self._before(owner, sys._getframe(1))
        return self._original.__get__(owner, kind)


class NoticedResult:
    """Calls `before(owner)`, and `after(owner, result)` where a method without arguments returns something.

    The frame that calls the method is `sys._getframe(2)` of `before`: to ask for a frame makes an object of it.
    """

    def __init__(
        self,
        original: Callable[[Any], Any],
        before: Callable[[Any], None] | None,
        after: Callable[[Any, Any], Any],
    ) -> None:
        self._original = original
        self._before = before
        self._after = after

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None or is_traced() or compiler._is_compiling_flag:
            return self._original.__get__(owner, kind)
        if self._before is not None:
            self._before(owner)
        # Both `map` call from C: neither of them is a frame. A method that is kept can be called again and again.
        owners = repeat(owner)
        return map(self._after, owners, map(self._original, owners)).__next__


def has_arguments(frame: FrameType, known: dict[tuple[CodeType, int], bool]) -> bool:
    """Whether the method that a frame looks up now is called with arguments."""
    key = (frame.f_code, frame.f_lasti)
    if key not in known:
        behind = (found for found in dis.get_instructions(frame.f_code) if found.offset > frame.f_lasti)
        call = next((found for found in behind if found.opname not in ("CACHE", "PRECALL", "PUSH_NULL")), None)
        known[key] = call is None or call.opname != "CALL" or bool(call.arg)
    return known[key]
