"""What is exchanged on classes and modules of torch, and put back. Never on the user's objects, which get pickled.

Each patch calls torch's own function exactly once, with the same arguments, and passes on what it returns or raises.
Only what stands around that call is ours, and that is contained.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

# Code of ours that torch.compile may come upon. Never compiled by itself; where it is inlined, `is_compiling` is true.
entries: list[CodeType] = []

_made: list[tuple[Any, str, Any]] = []


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    patch = around(original)
    _made.append((owner, name, original))
    if patch.__code__ not in entries:
        entries.append(patch.__code__)
    setattr(owner, name, patch)


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


def take_back() -> None:
    """Leave torch as it was."""
    for owner, name, original in reversed(_made):
        setattr(owner, name, original)
    _made.clear()
