"""Code of the script that runs inside of a backward pass: hooks, functions of its own.

A pass that is repeated runs some of it for the second time. What is computed there is the same; a trace that it leaves
in Python would be there twice.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from torchmedic.recovery.computed_again import Refused
from torchmedic.replay.isolation.python_state import THOROUGH_SECONDS, TooMuchInReach, python_left_alone
from torchmedic.source.objects.graph import walk
from torchmedic.source.objects.living import live_modules
from torchmedic.source.user_code import is_user_file


def reason_against(error: BaseException, parameters: Iterable[torch.Tensor]) -> str:
    """Why a pass cannot be repeated for what is left of it; empty if it can."""
    if _is_from_script(error) and any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters):
        return "memory ended in a hook of a parameter, which cannot be called again"
    return ""


def _is_from_script(error: BaseException) -> bool:
    """Whether an exception was raised by code that the engine has called; a mode is called by each operation."""
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(is_user_file(each.co_filename) and not each.co_name.startswith("__torch_") for each in codes)


def has_backward_hooks() -> bool:
    """Whether a module has a hook that a backward pass calls."""
    return any(
        each.__dict__.get("_backward_hooks") or each.__dict__.get("_backward_pre_hooks") for each in live_modules()
    )


def is_function(node: Any) -> bool:
    """Whether a node of a graph is an `autograd.Function` in Python, and none of ours."""
    made_by = str(getattr(getattr(type(node), "_forward_cls", None), "__module__", ""))
    return isinstance(node, BackwardCFunction) and not made_by.startswith("torchmedic.")


@contextlib.contextmanager
def without_trace(frame: FrameType, roots: Sequence[torch.Tensor], *, has_hooks: bool) -> Iterator[None]:
    """A context for a pass that is repeated. Hooks of parameters may do anything: each of them runs once.

    Args:
        frame: That called for the pass.
        roots: Of the graph.
        has_hooks: Whether there are hooks on results in the graph.

    Raises:
        Refused: The code of the script has left a trace in Python.
    """
    if not has_hooks and not any(is_function(node) for node in walk(each.grad_fn for each in roots)):
        yield
        return
    try:
        with python_left_alone(frame, thorough=THOROUGH_SECONDS) as noted:
            before = noted.changed
            yield
            if noted.changed != before:
                raise Refused(
                    "code of the script in the backward pass leaves a trace in Python (a hook, a function of its own), "
                    "which would be there twice (--recover all allows it)"
                )
    except TooMuchInReach as reason:
        raise Refused(f"the backward pass cannot be repeated: {reason}") from None
