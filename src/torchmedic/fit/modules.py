"""Modules, loaders and scalers on fake tensors, and the kernels that torch would choose on CUDA."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from torchmedic.fit.changes import Change
from torchmedic.fit.fake_device import DEVICE
from torchmedic.fit.machine import Machine
from torchmedic.replay.isolation.torch_state import replaced

_aten: Any = torch.ops.aten
_MAX_FLASH_WIDTH = 256  # elements of a head of attention
_HALF = (torch.float16, torch.bfloat16)
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # the numbers of cuDNN


@contextlib.contextmanager
def faked_modules(machine: Machine, change: Change) -> Iterator[None]:
    """Make parameters fake, and DataLoaders work in this process, until the end of the block."""
    answers = (
        (torch.nn.Parameter, "__new__", staticmethod(_parameter(machine))),
        (torch.nn.Module, "_apply", _moved(machine)),
        (torch.nn.Module, "register_buffer", _registered(machine)),
        (DataLoader, "__init__", _loader(machine, change)),
        (torch.nn.DataParallel, "forward", lambda self, *args, **kwargs: self.module(*args, **kwargs)),
        (torch.amp.GradScaler, "_maybe_opt_step", _always_steps),
        (torch, "ctc_loss", _with_plain_lengths(torch.ctc_loss)),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(replaced(owner, name, value))
        yield


def _parameter(machine: Machine) -> Any:
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if not isinstance(data, FakeTensor) and data.device.type in ("cpu", "cuda"):
            data = machine.fake_like(data.detach(), DEVICE if machine.adopt else None)
            if machine.adopt:
                machine.recorder.born(data, "parameters", machine.caller(), machine.caller())
        return original(cls, data, requires_grad)

    return new


def _registered(machine: Machine) -> Any:
    """`Module.register_buffer`: a buffer is on the device where no script moves it, as some calls compare devices."""
    original: Any = torch.nn.Module.register_buffer

    def register_buffer(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
        original(self, name, tensor, persistent)
        if machine.adopt and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.dim():
            made = self._buffers[name] = machine.fake_like(tensor.detach(), DEVICE)
            machine.recorder.born(made, "buffers", machine.caller(), machine.caller())

    return register_buffer


def _moved(machine: Machine) -> Any:
    """`Module._apply`, which converts and moves parameters: a fake parameter stays the same object."""

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        with machine.moving():
            for name, parameter in list(self._parameters.items()):
                if parameter is None:
                    continue
                with torch.no_grad():
                    made = fn(parameter)
                if made is not parameter:
                    self._parameters[name] = _with_content(parameter, made)
            for name, buffer in list(self._buffers.items()):
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    return _apply


def _with_content(parameter: Any, made: Any) -> Any:
    if not isinstance(parameter, FakeTensor) or not isinstance(made, FakeTensor):
        return torch.nn.Parameter(made, parameter.requires_grad)
    gradient, parameter.grad = parameter.grad, None
    parameter.data = made
    parameter.fake_device = made.fake_device
    if gradient is not None:
        parameter.grad = gradient.to(device=made.fake_device, dtype=made.dtype)
    return parameter


def _loader(machine: Machine, change: Change) -> Any:
    original: Any = DataLoader.__init__

    def created(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"num_workers": 0, "pin_memory": False, "timeout": 0}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "worker_init_fn"):
            kwargs.pop(name, None)
        if batch_size is not None and batch_size > 1:
            machine.trace.loader_sizes.append(batch_size)
            if change.loader is not None and batch_size == change.loader_was:
                batch_size = change.loader
        original(self, dataset, batch_size, *args, **kwargs)

    return created


def _with_plain_lengths(original: Any) -> Any:
    """`torch.ctc_loss`, which takes the values of lengths on the host, but not beside fake tensors."""

    def ctc_loss(scores: Any, targets: Any, *lengths: Any, **kwargs: Any) -> Any:
        given = [each.tolist() if type(each) is torch.Tensor and each.dim() == 1 else each for each in lengths]
        return original(scores, targets, *given, **kwargs)

    return ctc_loss


def _always_steps(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler` skips an update if it finds an infinite gradient, which a fake cannot tell."""
    return optimizer.step(*args, **kwargs)


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Choose kernels of attention and recurrent layers as a build with CUDA does, until the end of the block."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced
            library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
            for name in _MODES:
                library.impl(f"{name}.input", _recurrent(name), "AutogradCUDA")
                library.impl(f"{name}.data", _recurrent_packed(name), "AutogradCUDA")
        yield
    finally:
        library._destroy()


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    same_width = query.shape[-1] == value.shape[-1]
    flat = query.dim() == 4 and same_width
    in_rows = all(each is None or each.stride(-1) == 1 for each in (query, key, value, attn_mask))
    if (
        flat
        and in_rows
        and attn_mask is None
        and query.dtype in _HALF
        and query.shape[-1] <= _MAX_FLASH_WIDTH
        and torch.backends.cuda.flash_sdp_enabled()
    ):
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return _aten._scaled_dot_product_flash_attention.default(query, key, value, **options)[0]
    if flat and in_rows and not enable_gqa and torch.backends.cuda.mem_efficient_sdp_enabled():
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _lowered(tensors: list[Any]) -> list[Any]:
    """Recurrent layers are in half precision under autocast."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return [each.to(dtype) if each is not None and each.dtype == torch.float32 else each for each in tensors]


def _recurrent(name: str) -> Any:
    def layer(given: Any, hx: Any, params: Any, *shape: Any) -> Any:
        return _played(name, given, hx, params, shape[:-1], batch_first=shape[-1])

    return layer


def _recurrent_packed(name: str) -> Any:
    def layer(data: Any, batch_sizes: Any, hx: Any, params: Any, *shape: Any) -> Any:
        return _played(name, data, hx, params, shape, sizes=batch_sizes.tolist())

    return layer


def _played(
    name: str, given: Any, hx: Any, params: Any, shape: Any, *, batch_first: bool = False, sizes: Any = ()
) -> Any:
    _, layers, dropout, train, both_ways = shape  # the first is whether there are biases
    states = list(hx) if name == "lstm" else [hx, None]
    given, *states = _lowered([given, *states])
    weights = _lowered(list(params))
    hidden = states[0].shape[2]
    per_layer = len(weights) // (layers * (2 if both_ways else 1))
    options = (_MODES[name], hidden, 0, layers, batch_first, dropout, train, both_ways, list(sizes), None)
    # The weights of a layer lie in one piece, so that no copy of them is made.
    output, hy, cy, _, _ = _aten._cudnn_rnn.default(given, weights, per_layer, weights[0].detach(), *states, *options)
    return (output, hy, cy) if name == "lstm" else (output, hy)
