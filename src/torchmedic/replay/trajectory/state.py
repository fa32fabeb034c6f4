"""Weights, buffers, gradients and optimizers of an earlier update in place of the present ones, for a while.

The present tensors are set aside, not written to: afterwards every value is there again bit for bit.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchmedic.observe.numbers.state_copies import Copy, cloned
from torchmedic.replay.isolation.torch_state import muted, set_version


@contextlib.contextmanager
def rewound(copy: Copy) -> Iterator[None]:
    """A block in which the training is where it was when a copy was taken."""
    with contextlib.ExitStack() as stack:
        for reference, value in copy.tensors:
            tensor = reference()
            if tensor is not None and tensor.shape == value.shape and tensor.dtype == value.dtype:
                stack.callback(_put_back, tensor, tensor.data, tensor.grad, tensor._version)
                tensor.data = value.clone()
                tensor.grad = None
        for held in copy.optimizers:
            optimizer = held.optimizer()
            if optimizer is not None:
                _set_aside(stack, optimizer)
                parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
                optimizer.state = defaultdict(dict)
                for index, values in held.state.items():
                    if index < len(parameters):
                        optimizer.state[parameters[index]] = cloned(values)
        yield


def _put_back(tensor: torch.Tensor, data: torch.Tensor, gradient: torch.Tensor | None, version: int) -> None:
    tensor.data = data
    tensor.grad = gradient
    set_version(tensor, version)


def _set_aside(stack: contextlib.ExitStack, optimizer: Any) -> None:
    names = ("state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    for name in names:
        if name in vars(optimizer):
            stack.callback(setattr, optimizer, name, getattr(optimizer, name))
    for group in optimizer.param_groups:
        stack.callback(group.update, {name: value for name, value in group.items() if name != "params"})
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def update(
    optimizer: Any,
    gradients: list[tuple[torch.Tensor, torch.Tensor]],
    rates: list[Any],
    options: Mapping[str, Any],
) -> None:
    """Let an optimizer update its weights, with these gradients, learning rates and options.

    Whatever a schedule has put around the optimizer's `step` is left out.
    """
    own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if rate is not None:
            group["lr"] = rate
        group.update({name: value for name, value in options.items() if name in group})
    try:
        for tensor, gradient in gradients:
            if id(tensor) in own:
                tensor.grad = gradient
        with muted():
            type(optimizer).step(optimizer)
    finally:
        for tensor, _ in gradients:
            tensor.grad = None
