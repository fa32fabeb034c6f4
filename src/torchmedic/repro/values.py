"""Simpler values: zeros and ones if the program still fails, else fewer digits. Zeros, signs and infinities stay."""

from __future__ import annotations

import torch

from torchmedic.repro.recipe import Raises
from torchmedic.repro.search import Shrinker

INLINE = 64  # values that a script may contain in its text


def constant(shrinker: Shrinker) -> None:
    """Replace values by a constant if only shapes and types matter, as in most exceptions."""
    if not isinstance(shrinker.best.recipe.outcome, Raises):
        _constant_where_all_are(shrinker)
        return
    for given in shrinker.best.inputs:
        if given.fill is None:
            zero, one = (False, True) if given.dtype == "bool" else (0, 1)
            # If ones fail and zeros do not, or the other way round, the values matter.
            if shrinker.still_fails(shrinker.best.with_fill(given.name, one)):
                shrinker.offer(shrinker.best.with_fill(given.name, zero))


def _constant_where_all_are(shrinker: Shrinker) -> None:
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        if given.fill is not None or tensor.is_complex() or tensor.numel() < 2:
            continue
        first = tensor.flatten()[0]
        same = bool((tensor == first).all())
        if tensor.is_floating_point() and first != 0 and bool((tensor.sign() == first.sign()).all()):
            same = not shrinker.offer(shrinker.best.with_fill(given.name, first.sign().item())) and same
        if same:
            shrinker.offer(shrinker.best.with_fill(given.name, first.item()))


def rounded(shrinker: Shrinker) -> None:
    """Simplify whole tensors: ones with the same signs, else fewer digits."""
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        if given.fill is not None or not tensor.is_floating_point() or not tensor.numel():
            continue
        for digits in (0, 1, 2, 3):
            simple = _rounded(tensor, digits)
            if bool(((simple == tensor) | (simple.isnan() & tensor.isnan())).all()):
                break
            if shrinker.offer(shrinker.best.with_tensors({given.name: simple})):
                break


def one_by_one(shrinker: Shrinker) -> None:
    """Simplify element by element, if there are few."""
    zero = isinstance(shrinker.best.recipe.outcome, Raises)
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        if given.fill is not None or tensor.is_complex() or tensor.dtype is torch.bool or tensor.numel() > INLINE:
            continue
        for position in range(tensor.numel()):
            for simple in _simpler(shrinker.best.tensors[given.name].flatten()[position], zero):
                changed = shrinker.best.tensors[given.name].clone()
                changed.view(-1)[position] = simple
                if shrinker.offer(shrinker.best.with_tensors({given.name: changed})):
                    break
        _constant_where_all_are(shrinker)


def _simpler(value: torch.Tensor, zero: bool) -> list[torch.Tensor]:
    if value.is_floating_point():
        candidates = [_rounded(value, digits) for digits in (0, 1, 2, 3, 4)]
    else:
        whole = int(value.item())
        sign = -1 if whole < 0 else 1
        sizes = sorted({0 if zero else 1, 1, 2, 10, 100, 1000, abs(whole) // 2, abs(whole) - 1})
        # A negative index and an index that is too large are different mistakes.
        candidates = [value.new_tensor(sign * size) for size in sizes if 0 <= size < abs(whole) and (sign > 0 or size)]
    found: list[torch.Tensor] = []
    for candidate in candidates:
        if bool(candidate == value):
            break
        found.append(candidate)
    return found


def _rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """Round to significant digits; with 0 digits, to 1 or -1. Zeros, infinities and subnormal numbers stay."""
    wide = tensor.double()
    kept = (wide == 0) | ~wide.isfinite() | (wide.abs() < torch.finfo(tensor.dtype).tiny)
    if digits == 0:
        simple = wide.sign()
    else:
        scale = 10.0 ** (digits - 1 - wide.abs().clamp_min(1e-300).log10().floor())
        simple = (wide * scale).round() / scale
    return torch.where(kept, wide, simple).to(tensor.dtype)
