"""Operations of torchmedic that the user's modes and profilers do not see.

A `TorchDispatchMode` or `TorchFunctionMode` of the user's, and a profiler, would see every look of ours at a tensor: a
mode may change what it sees, and a profile would count it. While one of them is active, our hooks run outside of it:
the modes are taken off their stacks, so that modes of our own work as usual. The default device is such a mode too;
a replay of the user's code needs it (`with_default_device`). Where torch itself traces, its modes stay, as its tensors
cannot be asked anything without them; nothing is dispatched to them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from torchmedic import contained as containment

function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_record: Callable[[bool], None] = torch._C._autograd._enable_record_function

_with_subclasses: Any = getattr(torch._C, "_EnableTorchFunction", None)  # not in every version


class _Hidden(threading.local):
    """What this thread's hook runs outside of; nothing while no hook is running."""

    is_hiding = False
    default_device: Any = None
    is_unseen = False  # by subclasses of tensors


_hidden = _Hidden()


def install() -> None:
    """Have every contained hook run outside of modes and profilers."""
    containment.has_function_modes = function_modes
    containment.has_dispatch_modes = dispatch_modes
    containment.is_profiling = is_profiling
    containment.hide = hide


def hide() -> Callable[[], None] | None:
    """Step outside of modes and profilers. The result steps back in; None: that is done already."""
    if _hidden.is_hiding:
        return None  # a hook inside of a hook
    if dispatch_modes() and any(_is_of_torch(mode) for mode in _dispatch_stack()):
        return _guarded()
    functions = [_pop_function_mode() for _ in range(function_modes())]
    dispatches = [_pop_dispatch_mode() for _ in range(dispatch_modes())]
    was_profiling = is_profiling()
    if was_profiling:
        _record(False)
    _hidden.is_hiding = True
    _hidden.default_device = next((mode for mode in functions if isinstance(mode, DeviceContext)), None)

    def show() -> None:
        _hidden.is_hiding = False
        _hidden.default_device = None
        if was_profiling:
            _record(True)
        for mode in reversed(dispatches):
            _push_dispatch_mode(mode)
        for mode in reversed(functions):
            _push_function_mode(mode)

    return show


def _is_of_torch(mode: object) -> bool:
    """Whether a mode is one of torch's own: of fake tensors, of the compiler, of a trace."""
    return type(mode).__module__.startswith("torch.")


def _guarded() -> Callable[[], None]:
    """Switch off dispatch to modes and subclasses. The result switches it on."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch._C._DisableTorchDispatch())
    if is_profiling():
        _record(False)
        stack.callback(_record, True)
    _hidden.is_hiding = True
    stack.callback(setattr, _hidden, "is_hiding", False)
    return stack.close


@contextlib.contextmanager
def with_default_device() -> Iterator[None]:
    """Run the user's code with the default device that the running hook has stepped outside of."""
    mode = _hidden.default_device
    if mode is None:
        yield
        return
    with mode:
        yield


@contextlib.contextmanager
def unseen_by_subclasses() -> Iterator[None]:
    """Have no `__torch_function__` of a tensor subclass called, but in `seen_by_subclasses`."""
    if _with_subclasses is None:
        yield
        return
    with torch._C.DisableTorchFunctionSubclass():
        _hidden.is_unseen = True
        try:
            yield
        finally:
            _hidden.is_unseen = False


@contextlib.contextmanager
def seen_by_subclasses() -> Iterator[None]:
    """Run the user's code, whose tensor subclasses are to take part."""
    if _with_subclasses is None or not _hidden.is_unseen:
        yield
        return
    with _with_subclasses():
        yield
