"""Everything that a replay could disturb, put back afterwards exactly as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmedic.observe.context import Notes


@contextlib.contextmanager
def preserved(modules: Iterable[torch.nn.Module], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """RNG, buffers, gradients and modes of the modules are the same after the block as before it."""
    modules = list(modules)
    tensors = {id(tensor): tensor for tensor in parameters}
    tensors |= {id(tensor): tensor for module in modules for tensor in module.parameters()}
    rng = _rng_states()
    gradients = [(tensor, tensor.grad) for tensor in tensors.values() if tensor.is_leaf]
    buffers = [
        (tensor, tensor.detach().clone())
        for module in modules
        for tensor in module.buffers()
        if tensor.layout is torch.strided
    ]
    training = [(child, child.training) for module in modules for child in module.modules()]
    versions = [(tensor, tensor._version) for tensor in tensors.values() if not tensor.is_inference()]
    plain = [(child, dict(child.__dict__)) for module in modules for child in module.modules()]
    try:
        for tensor, gradient in gradients:
            # What is there may already hold the result of the step that is replayed, so it starts from zero.
            tensor.grad = None if gradient is None else torch.zeros_like(gradient).detach()
        yield
    finally:
        for tensor, gradient in gradients:
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, value in buffers:
                _put_back(tensor, value)
        for child, mode in training:
            child.training = mode
        for child, attributes in plain:
            # Counters and cached tensors that a forward pass leaves on its module.
            child.__dict__.clear()
            child.__dict__.update(attributes)
        for tensor, version in versions:
            # The real step may still go back through a graph that has saved this weight.
            if tensor._version != version:
                set_version(tensor, version)
        _restore_rng(rng)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Give a tensor back the version that it had, so that a graph which has saved it stays valid."""
    set_counter: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counter((tensor,), (version,))
    except TypeError:  # before torch 2.7
        set_counter(tensor, version)


def _put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.equal(tensor, value) or (value.is_floating_point() and bool(torch.isnan(value).any())):
        version = tensor._version
        tensor.copy_(value)
        set_version(tensor, version)


def _rng_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def _restore_rng(states: tuple[Any, ...]) -> None:
    cpu, devices, python, numpy_state = states
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def rewind_rng(notes: Notes) -> None:
    """Draw the same random numbers as the step did."""
    if notes.rng is not None:
        torch.set_rng_state(notes.rng)
    if notes.device_rng:
        torch.cuda.set_rng_state_all(notes.device_rng)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what the block prints, logs and warns of: the real step has said it already."""
    level = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
