"""Operations that let no gradient through for some values: whether they let any through at all."""

from __future__ import annotations

from typing import Any

import torch

_BIG = 1 << 26  # elements of a tensor that is not measured
# Their derivative is 0 wherever there is one.
_FLAT = frozenset("RoundBackward FloorBackward CeilBackward TruncBackward SignBackward".split())


def is_closed(kind: str, raw: Any) -> Any:
    """Whether a gate lets no gradient through; None for what is no gate, or cannot be told."""
    if kind in _FLAT:
        return True
    if kind == "ReluBackward":
        result = _readable(raw._saved_result)
        return None if result is None else result.amax() <= 0
    if kind == "SigmoidBackward":
        result = _readable(raw._saved_result)
        return None if result is None else (result.amin() == 1) | (result.amax() == 0)
    if kind == "TanhBackward":
        result = _readable(raw._saved_result)
        return None if result is None else (result.amin() == 1) | (result.amax() == -1)
    if kind in ("ClampBackward", "ClampMinBackward", "ClampMaxBackward", "HardtanhBackward"):
        given = _readable(raw._saved_self)
        low = getattr(raw, "_saved_min", getattr(raw, "_saved_min_val", None))
        high = getattr(raw, "_saved_max", getattr(raw, "_saved_max_val", None))
        if given is None or isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
            return None
        closed = [given.amax() < low] if low is not None else []
        closed += [given.amin() > high] if high is not None else []
        return closed[0] if len(closed) == 1 else closed[0] | closed[1] if closed else None
    return None


def _readable(tensor: Any) -> torch.Tensor | None:
    """A saved tensor whose extremes can be computed without more memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not 0 < tensor.numel() <= _BIG:
        return None
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_complex():
        return None
    found: torch.Tensor = tensor.detach()
    return found
