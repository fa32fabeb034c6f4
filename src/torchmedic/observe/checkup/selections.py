"""Operations that let a gradient pass only where a mask says so, and whether the mask of one leaves nothing."""

from __future__ import annotations

from typing import Any

import torch

# The tensors that such a node saves. A gradient passes to the input at the place in the tuple where the mask is True.
_MASKS = {"WhereBackward": "_saved_condition", "MaskedSelectBackward": "_saved_mask"}
SELECTING = frozenset({*_MASKS, "MaskedFillBackward", "IndexBackward"})
_MAX_ELEMENTS = 1 << 22


# Losses that have saved the weights they were given.
WEIGHTED = frozenset("BinaryCrossEntropyBackward BinaryCrossEntropyWithLogitsBackward".split())


def leaves_nothing(kind: str, raw: Any) -> Any:
    """Whether no element is selected; None for what is no selection. A tensor until it is read."""
    if kind == "IndexBackward":
        return True if 0 in raw._input_metadata[0].shape else None
    if kind == "MaskedFillBackward":
        mask = _readable(raw._saved_mask)
        return None if mask is None else mask.all()
    if kind == "WhereBackward" and all(later is not None for later, _ in raw.next_functions):
        return None
    if kind in _MASKS:
        mask = _readable(getattr(raw, _MASKS[kind]))
        is_else = raw.next_functions[0][0] is None
        return None if mask is None else mask.all() if is_else else ~mask.any()
    if kind == "MulBackward":
        factor = _readable(constant_factor(raw))
        return None if factor is None or factor.numel() < 2 else ~factor.any()
    if kind in WEIGHTED:
        weight = _readable(raw._saved_weight)
        return None if weight is None else ~weight.any()
    return None


def constant_factor(raw: Any) -> Any:
    """The factor of a product that has no graph; None where both have one."""
    behind = [later for later, _ in raw.next_functions]
    if len(behind) != 2 or None not in behind:
        return None
    return raw._saved_self if behind[0] is None else raw._saved_other


def _readable(tensor: Any) -> torch.Tensor | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not 0 < tensor.numel() <= _MAX_ELEMENTS:
        return None
    return tensor.detach() if tensor.layout is torch.strided and not tensor.is_meta else None
