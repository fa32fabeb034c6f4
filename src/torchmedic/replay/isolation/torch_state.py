"""Everything that a replay could disturb, put back afterwards exactly as it was."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchmedic.observe.context import Notes
from torchmedic.replay.isolation.undo import random_numbers


@contextlib.contextmanager
def preserved(modules: Iterable[torch.nn.Module], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """RNG, buffers, gradients and modes of the modules are the same after the block as before it."""
    modules = list(modules)
    tensors = [*parameters, *(tensor for module in modules for tensor in module.parameters())]
    buffers = [
        (tensor, tensor.detach().clone())
        for module in modules
        for tensor in module.buffers()
        if tensor.layout is torch.strided
    ]
    with same_random_numbers(), same_tensors(tensors) as leaves, same_modules(modules):
        try:
            for tensor in leaves:
                # What is there may already hold the result of the step that is replayed, so it starts from zero.
                if tensor.grad is not None:
                    tensor.grad = torch.zeros_like(tensor.grad).detach()
            yield
        finally:
            with torch.no_grad():
                for tensor, value in buffers:
                    put_back(tensor, value)


@contextlib.contextmanager
def same_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Put back which memory and which gradients tensors have, and their versions; yields the leaves among them."""
    known = {id(tensor): tensor for tensor in tensors}.values()
    memory = [(tensor, tensor.data) for tensor in known if _address(tensor)]
    gradients = [(tensor, tensor.grad) for tensor in known if tensor.is_leaf]
    versions = [(tensor, tensor._version) for tensor in known if not tensor.is_inference()]
    try:
        yield [tensor for tensor, _ in gradients]
    finally:
        for tensor, data in memory:
            if _address(tensor) != _address(data):
                tensor.data = data  # the replay has bound other memory: `p.data = p.data - rate * p.grad`
        for tensor, gradient in gradients:
            tensor.grad = gradient
        for tensor, version in versions:
            # The real step may still go back through a graph that has saved this weight.
            if tensor._version != version:
                set_version(tensor, version)


def _address(tensor: torch.Tensor) -> int:
    """Where the values of a tensor lie; 0 for tensors without memory of their own, such as those inside of `vmap`."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


@contextlib.contextmanager
def same_modules(roots: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put back the attributes, parameters and buffers of modules, such as counters that a forward pass leaves."""
    children = {id(child): child for root in roots for child in root.modules()}.values()
    tables: list[dict[str, Any]] = [child.__dict__ for child in children]
    held = (child.__dict__.get(name) for child in children for name in ("_parameters", "_buffers"))
    tables += [table for table in held if isinstance(table, dict)]  # those of compiled scripts are of another kind
    before = [dict(table) for table in tables]
    modes = [(child, child.training) for child in children]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
        for child, mode in modes:
            child.training = mode


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute until the end of the block."""
    missing = object()
    before = vars(owner).get(name, missing)  # `getattr` would ask a hook's descriptor, which gives torch's own
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Give a tensor back the version that it had, so that a graph which has saved it stays valid."""
    set_counter: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_counter((tensor,), (version,))
    except TypeError:  # before torch 2.7
        set_counter(tensor, version)


def put_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor back the values that it had, in the same version."""
    if tensor.is_meta:
        return  # no values
    if not torch.equal(tensor, value) or (value.is_floating_point() and bool(torch.isnan(value).any())):
        version = tensor._version
        tensor.copy_(value)
        set_version(tensor, version)


@contextlib.contextmanager
def same_random_numbers(*, on_device: bool = True) -> Iterator[None]:
    """Put back the random numbers of Python, NumPy and torch; without `on_device`, no device is asked for its own."""
    host, others = torch.get_rng_state(), list(random_numbers())
    devices = torch.cuda.get_rng_state_all() if on_device and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        for put_back_numbers in others:
            put_back_numbers()


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
