"""Weights, buffers, gradients and optimizers of an earlier update in place of the present ones, for a while.

The present tensors are set aside, not written to: afterwards every value is there again bit for bit.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchmedic.observe.numbers.windows import Copy, cloned
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.isolation.torch_state import muted, set_version

_GROWN = 10.0  # times the largest weight of then
_MAX_PARTS = 300  # of a module


class Follower(NamedTuple):
    """Weights that no optimizer has, and those of a trained module that they are a copy of."""

    own: Sequence[torch.Tensor]
    trained: Sequence[torch.Tensor]


def followers(modules: Sequence[torch.nn.Module], values: Container[int]) -> Iterator[Follower]:
    """The modules that may follow trained ones, as target networks and teachers do: they have the same shapes.

    Args:
        modules: In reach of the step; their parts are looked at as well.
        values: The ids of the trained weights.
    """
    parts = {id(each): each for module in modules for each in itertools.islice(module.modules(), _MAX_PARTS)}
    all_weights = [weights for each in parts.values() if (weights := list(each.parameters()))]
    trained = [weights for weights in all_weights if all(id(each) in values for each in weights)]
    shapes = {tuple(each.shape for each in weights): weights for weights in reversed(trained)}
    seen: set[int] = set()
    for own in all_weights:
        counterpart = shapes.get(tuple(weight.shape for weight in own))
        if counterpart is not None and not any(id(weight) in values or id(weight) in seen for weight in own):
            seen.update(map(id, own))
            yield Follower(own, counterpart)


def with_followers(copy: Copy, modules: Sequence[torch.nn.Module]) -> Copy:
    """A copy that also sets back modules that follow trained ones and have grown with them.

    Their weights of then are not known. Those of the trained module are taken.
    """
    values = {id(tensor): value for tensor, value in copy.pairs()}
    added: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
    for own, trained in followers(modules, values):
        then = [values[id(weight)] for weight in trained]
        if not largest(own) <= _GROWN * largest(then):
            added += [(weakref.ref(weight), value) for weight, value in zip(own, then, strict=True)]
    return copy._replace(tensors=[*copy.tensors, *added])


def largest(tensors: Sequence[torch.Tensor]) -> float:
    """The largest magnitude of all elements."""
    return max(float(tensor.detach().abs().amax()) for tensor in tensors)


@contextlib.contextmanager
def rewound(copy: Copy, *, with_state: bool = True) -> Iterator[None]:
    """A block in which the training is where it was when a copy was taken.

    Args:
        copy: Weights, buffers and optimizers of then.
        with_state: Whether the optimizers have the state of then; otherwise they have none.
    """
    with contextlib.ExitStack() as stack:
        for tensor, value in copy.pairs():
            stack.callback(_put_back, tensor, tensor.data, tensor.grad, tensor._version)
            tensor.data = value.clone()
            tensor.grad = None
        for held in copy.optimizers:
            optimizer = held.optimizer()
            if optimizer is not None:
                _set_aside(stack, optimizer)
                parameters = parameters_of(optimizer)
                optimizer.state = defaultdict(dict)
                for index, values in held.state.items():
                    if with_state and index < len(parameters):
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
    evaluate: Callable[[], tuple[float, list[tuple[torch.Tensor, torch.Tensor]]]] | None = None,
    momenta: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Let an optimizer update its weights, with these gradients, learning rates and options.

    Whatever a schedule has put around the optimizer's `step` is left out.

    Args:
        optimizer: Which one.
        gradients: Of the weights as they are.
        rates: The learning rate of every group.
        options: Further settings of the groups.
        evaluate: Gives the loss and the gradients for other weights, for an optimizer that asks for them (LBFGS).
        momenta: The momentum or the betas of every group.
    """
    own = {id(tensor): tensor for tensor in parameters_of(optimizer)}
    for at, group in enumerate(optimizer.param_groups):
        rate = rates[at] if at < len(rates) else None
        if rate is not None:
            group["lr"] = rate
        group.update(momenta[at] if at < len(momenta) else {})
        group.update({name: value for name, value in options.items() if name in group})
    seen = {id(tensor): tensor for tensor, _ in gradients}
    # A weight that is not to be updated has perhaps a gradient of the present step.
    others = [(tensor, tensor.grad) for key, tensor in own.items() if key not in seen and tensor.grad is not None]

    def closure() -> torch.Tensor:
        assert evaluate is not None
        loss, found = evaluate()
        for tensor, gradient in found:
            if id(tensor) in own:
                seen[id(tensor)] = tensor
                tensor.grad = gradient
        return torch.tensor(loss)

    try:
        for tensor, _ in others:
            tensor.grad = None
        for tensor, gradient in gradients:
            if id(tensor) in own:
                tensor.grad = gradient
        with muted():
            if evaluate is not None and needs_closure(optimizer):
                type(optimizer).step(optimizer, closure)
            else:
                type(optimizer).step(optimizer)
    finally:
        for tensor in seen.values():
            tensor.grad = None
        for tensor, present in others:
            tensor.grad = present


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer cannot step without a function that gives it the loss."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
