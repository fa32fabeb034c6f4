"""Functions that choose another kernel on CUDA than on any other device: attention and recurrent layers.

On a build without CUDA the choice of torch would be the one of a device without such kernels. The functions are
replaced for CUDA tensors until the end of a block.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_aten: Any = torch.ops.aten
_MAX_FLASH_WIDTH = 256  # of a head
_HALF = (torch.float16, torch.bfloat16)
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # the numbers of cuDNN


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Choose kernels as a CUDA build would."""
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
