"""Operations of torchmedic that the user's modes and profilers do not see.

A `TorchDispatchMode` or `TorchFunctionMode` of the user's, and a profiler, would see every look of ours at a tensor: a
mode may change what it sees, and a profile would count it. While one of them is active, our hooks run outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import torch

from torchmedic import contained as containment

_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_record: Callable[[bool], None] = torch._C._autograd._enable_record_function

_hiding = threading.local()


def install() -> None:
    """Have every contained hook run outside of modes and profilers."""
    containment.has_function_modes = _function_modes
    containment.has_dispatch_modes = _dispatch_modes
    containment.is_profiling = _is_profiling
    containment.hide = hide


def hide() -> Callable[[], None] | None:
    """Step outside of modes and profilers. The result steps back in; None: that is done already."""
    if getattr(_hiding, "depth", 0):
        return None  # a hook inside of a hook
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    if _dispatch_modes():
        stack.enter_context(torch._C._DisableTorchDispatch())
    if _is_profiling():
        _record(False)
        stack.callback(_record, True)
    _hiding.depth = 1
    stack.callback(setattr, _hiding, "depth", 0)
    return stack.close
