"""The calls of modules, seen while memory may run out, and the hooks that would see their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.modules import module as nn_module

from torchmedic.observe.hooks.patches import without_our_frame

WHOLE = object()  # instead of a result: the call is not made in parts
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_codes: set[Any] = set()


class Splitting(Protocol):
    """Makes calls of modules in parts."""

    has_plans: bool  # for some module
    unhelped: int  # identity of the exception that nothing else could be done about

    def planned(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any: ...

    def after_failure(self, module: torch.nn.Module, args: Any, kwargs: Any, error: BaseException) -> Any: ...


def around_call(splits: Splitting, original: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a module, which is in no traceback."""

    @functools.wraps(original)
    def _wrapped_call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        if splits.has_plans:
            result = splits.planned(self, args, kwargs)
            if result is not WHOLE:
                return result
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            without_our_frame(error)
            if id(error) != splits.unhelped:
                raise
            result = splits.after_failure(self, args, kwargs, error)
            if result is WHOLE:
                raise
        return result

    _codes.add(getattr(_wrapped_call_impl, "__code__"))  # noqa: B009
    return _wrapped_call_impl


def is_inside_call(frame: FrameType | None) -> bool:
    """Whether a call of a module is under way around a frame."""
    while frame is not None:
        if frame.f_code in _codes:
            return True
        frame = frame.f_back
    return False


def is_in_line_search(frame: FrameType | None) -> bool:
    """Whether LBFGS is under way: its search decides by small differences of the loss, which rounding may turn."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.optim.lbfgs":
            return True
        frame = frame.f_back
    return False


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks of the user's would see the calls of a module, or of one inside it."""
    tables = [vars(each).get(name) for each in module.modules() for name in _HOOKS]
    tables += [getattr(nn_module, f"_global{name}") for name in _HOOKS]
    hooks = (hook for table in tables if table is not None for hook in table.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("torchmedic.") for hook in hooks)
