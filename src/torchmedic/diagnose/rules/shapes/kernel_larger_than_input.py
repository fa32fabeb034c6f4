"""A kernel, a pooling window or a padding is larger than its input.

What: a convolution or pooling needs an input at least as large as its kernel, padding included. Here the output would
be empty. Reflection padding must be smaller than the input.

Why: every pooling and every stride reduces the size of an image; after a few of them, or with smaller images than the
network was written for, the input of the next layer is too small.

Cure: use fewer or smaller strides and kernels, add padding, use larger inputs, or use adaptive pooling as the last
layer.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import built_here, fed_by, layer_name, layer_of, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.lookup.failing_call import Call

_CONV = re.compile(r"conv([123])d")
_POOL = re.compile(r"_?(?:max|avg|lp)_pool([123])d(?:_with_indices)?")


@rule("TM162", "kernel-larger-than-input")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds:
        return None
    for call in evidence.calls:
        found = _reach(call)
        if found is not None:
            return _diagnosis(evidence, call, *found)
    return None


def _diagnosis(evidence: RaisedEvidence, call: Call, given: torch.Tensor, what: str, size: int, reach: int) -> Draft:
    layer = layer_of(evidence, call)
    name = layer_name(evidence, layer) if layer is not None else f"`{call.op.lstrip('_')}`"
    draft = check.draft(evidence, "proven")
    draft.message = f"the {what} of {name} reaches over {reach}, and its input is only {size} wide"
    draft.cause = f"its input is {shape(given)}; the size {size}, padding included, is smaller than {reach}"
    draft.at(*evidence.at_user_line("cause", f"{shape(given)} is too small for a {what} of {reach}"))
    draft.at(made_here(evidence, given, f"becomes {shape(given)}"))
    draft.at(built_here(evidence, layer, f"the {what} is set here"))
    draft.because(fed_by(evidence, layer))
    return draft.help("use fewer strides or poolings before it, a smaller kernel, more padding, or larger inputs")


def _reach(call: Call) -> tuple[torch.Tensor, str, int, int] | None:
    """The input, what is too large, the size of the input there and the size that would be needed."""
    given = call.get(0, "input")
    if not isinstance(given, torch.Tensor):
        return None
    if conv := _CONV.fullmatch(call.op):
        spatial = int(conv[1])
        weight = call.get(1, "weight")
        if not isinstance(weight, torch.Tensor) or weight.dim() != spatial + 2:
            return None
        kernel = list(weight.shape[2:])
        padding, dilation = _each(call.get(4, "padding"), spatial, 0), _each(call.get(5, "dilation"), spatial, 1)
    elif pool := _POOL.fullmatch(call.op):
        spatial = int(pool[1])
        kernel = _each(call.get(1, "kernel_size"), spatial, 1)
        padding = _each(call.get(3, "padding"), spatial, 0)
        dilation = _each(call.get(4, "dilation"), spatial, 1) if "max" in call.op else [1] * spatial
    elif call.op == "unfold" and isinstance(window := call.get(2, "size"), int):
        along = call.get(1, "dimension")
        if isinstance(along, int) and -given.dim() <= along < given.dim() and given.shape[along] < window:
            return given, "window", int(given.shape[along]), window
        return None
    elif call.op == "pad":
        return _reflected(call, given)
    else:
        return None
    if given.dim() not in (spatial + 1, spatial + 2):
        return None
    for size, width, pad, step in zip(given.shape[-spatial:], kernel, padding, dilation, strict=True):
        reach = step * (width - 1) + 1
        if size + 2 * pad < reach:
            return given, "kernel", int(size) + 2 * pad, reach
    return None


def _reflected(call: Call, given: torch.Tensor) -> tuple[torch.Tensor, str, int, int] | None:
    pad, mode = call.get(1, "pad"), call.get(2, "mode")
    if mode not in ("reflect", "circular") or not isinstance(pad, list | tuple):
        return None
    for position, width in enumerate(pad):
        size = int(given.shape[-1 - position // 2])
        if width >= size + (mode == "circular"):
            return given, "padding", size, int(width)
    return None


def _each(value: Any, spatial: int, default: int) -> list[int]:
    """An option of a convolution or pooling, one number per dimension of space."""
    if isinstance(value, int):
        return [value] * spatial
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return list(value) * spatial if len(value) == 1 else list(value)[:spatial]
    # "same" never makes the output too small, whatever the kernel.
    return [1 << 30 if value == "same" else default] * spatial
