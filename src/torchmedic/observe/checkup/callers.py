"""Who calls a function of torch that is watched: the user's instructions above it, which also get its warnings."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from torchmedic.observe.checkup.node_births import Site
from torchmedic.source.user_code import is_user_file

_CALLING = (lambda original, args, kwargs: original(*args, **kwargs)).__code__
_MAX_SITES = 6  # of one call


def from_line_of(frame: FrameType, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as if from the line that a frame is at, so that a warning of torch's names that line."""
    code = _CALLING.replace(co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno)
    return FunctionType(code, frame.f_globals)(original, args, kwargs)


def sites_of(frame: FrameType | None) -> tuple[Site, ...]:
    """The user's own instructions at and above a frame, innermost first."""
    sites: list[Site] = []
    while frame is not None and len(sites) < _MAX_SITES:
        code = frame.f_code
        if is_user_file(code.co_filename) and code.co_code != _CALLING.co_code:
            sites.append(Site(code, frame.f_lasti))
        frame = frame.f_back
    return tuple(sites)
