"""Losses of `torch.func.grad` and `grad_and_value`, in a loop that has no optimizer.

Inside of such a transform tensors are wrapped, and no operation of ours may become a part of it: the loss and the
tensors that are trained are taken out of their wrappers, and looked at while the transform is set aside.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.numbers.finite_checks import in_functorch
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.source.objects.graph import leaves_behind

_MAX_NODES = 2000  # of a graph that is walked to its leaves
_MAX_FRAMES = 8
_TRANSFORM, _MODULE = "grad_and_value_impl", "torch._functorch.eager_transforms"
_trained: dict[int, weakref.ref[torch.Tensor]] = {}  # by the last such loss


class FuncLoss(NamedTuple):
    """A loss and the tensors that it is differentiated by, without their wrappers."""

    roots: list[torch.Tensor]
    leaves: list[torch.Tensor]


def func_loss(roots: Sequence[Any], frame: FrameType) -> FuncLoss | None:
    """The loss of the only transform that is active; None for anything else, such as a transform inside of another.

    Args:
        roots: What is differentiated.
        frame: Below the transform.
    """
    if not in_functorch() or torch._C._len_torch_dispatch_stack() or not _is_of_model(frame):
        return None
    plain = [without_wrapper(root) for root in roots]
    found = [root for root in plain if root is not None and root.numel() == 1]
    if len(found) != 1 or len(plain) != 1:
        return None
    leaves = [each for leaf in leaves_behind(roots, _MAX_NODES) if (each := without_wrapper(leaf)) is not None]
    _trained.clear()
    _trained.update({id(leaf): weakref.ref(leaf) for leaf in leaves})
    return FuncLoss(found, leaves)


def _is_of_model(frame: FrameType) -> bool:
    """Whether a function is differentiated by a container of tensors, or is given others as well: weights and a batch.

    A function of one tensor may be anything: the energy of a sampler, a curve.
    """
    outer: FrameType | None = frame
    for _ in range(_MAX_FRAMES):
        if outer is None:
            return False
        if outer.f_code.co_name == _TRANSFORM and outer.f_globals.get("__name__") == _MODULE:
            given = outer.f_locals
            numbers = given["argnums"] if isinstance(given["argnums"], tuple) else (given["argnums"],)
            args = list(given["args"])
            by = [args[number] for number in numbers if number < len(args)]
            others = [arg for arg in args if not any(arg is each for each in by)]
            is_container = len(by) > 1 or any(not isinstance(each, torch.Tensor) for each in by)
            return is_container or bool(tensors_in([*others, given["kwargs"]], 2))
        outer = outer.f_back
    return False


def is_trained(tensor: torch.Tensor) -> bool:
    """Whether the last such loss was differentiated by a tensor."""
    known = _trained.get(id(tensor))
    return known is not None and known() is tensor


def set_aside() -> AbstractContextManager[Any]:
    """A block that runs as if no transform were active."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def without_wrapper(tensor: Any) -> torch.Tensor | None:
    """A tensor inside of a single wrapper; None where there are several, or other ones."""
    if not isinstance(tensor, torch.Tensor) or not torch._C._functorch.is_gradtrackingtensor(tensor):
        return None
    inner: torch.Tensor = torch._C._functorch.get_unwrapped(tensor)
    return None if torch._C._functorch.is_functorch_wrapped_tensor(inner) else inner
