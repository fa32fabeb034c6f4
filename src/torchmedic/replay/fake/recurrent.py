"""Recurrent layers of cuDNN on fakes: torch knows neither the size of what they keep for backward, nor their backward.

What is kept is cuDNN's own affair. The numbers here are those that it was seen to ask for on an H200, to the byte: for
every row, time step, direction and layer the gates and the cell, and between two layers what one gives to the next.
"""

from __future__ import annotations

from typing import Any

import torch

_KEPT = {0: 1, 1: 1, 2: 5, 3: 6}  # numbers per hidden unit, by cuDNN's mode: ReLU, tanh, LSTM, GRU


def answers(func: Any) -> bool:
    return func in (torch.ops.aten._cudnn_rnn.default, torch.ops.aten._cudnn_rnn_backward.default)


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a recurrent operation on fakes."""
    if func is torch.ops.aten._cudnn_rnn_backward.default:
        return _backward(*args, **kwargs)
    output, hy, cy, _, buffer = func(*args, **kwargs)
    given, mode, hidden, layers, batch_first, train, bidirectional = (args[at] for at in (0, 6, 7, 9, 10, 12, 13))
    reserve = given.new_empty(kept_bytes(given, mode, hidden, layers, bidirectional) if train else 0, dtype=torch.uint8)
    if buffer is None:  # weights that do not lie in one piece are copied into one
        buffer = given.new_empty(sum(weight.numel() for weight in args[1]))
    if batch_first and output.dim() == 3:  # cuDNN writes time first
        output = output.transpose(0, 1).contiguous().transpose(0, 1)
    return output, hy, cy, reserve, buffer


def kept_bytes(given: torch.Tensor, mode: int, hidden: int, layers: int, bidirectional: bool) -> int:
    """Bytes that are kept for backward, for an input [time, rows, features] in either order, or a packed one."""
    rows = given.numel() // max(1, given.shape[-1])
    per_row = hidden * (2 if bidirectional else 1) * (_KEPT.get(mode, 6) * layers + layers - 1)
    return rows * per_row * given.element_size()


def _backward(given: Any, weights: Any, stride: Any, buffer: Any, hx: Any, cx: Any, *rest: Any, **named: Any) -> Any:
    wanted = rest[-1]  # which of the four are asked for
    flat = given.new_empty(sum(weight.numel() for weight in weights))
    gradients, start = [], 0
    for weight in weights:
        gradients.append(flat[start : start + weight.numel()].view(weight.shape))
        start += weight.numel()
    return (
        torch.empty_like(given) if wanted[0] else None,
        torch.empty_like(hx) if wanted[1] else None,
        torch.empty_like(cx) if wanted[2] and cx is not None else None,
        gradients,
    )
