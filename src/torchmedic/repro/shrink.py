"""Make a failing program smaller, as a property-based tester would: change it, keep the change if it still fails.

What made it fail must stay the cause. So a zero is never put where there was none and never taken away, signs and
infinities stay, no dimension becomes empty, and NaN for infinity is no fair exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch

from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Line, Many, Raises, Ref

INLINE = 64  # numbers that a script holds in its text


class Budget(NamedTuple):
    """How often the program may be tried, and for how long."""

    queries: int = 400
    seconds: float = 10.0


class Shrinker:
    """Holds the smallest program so far."""

    def __init__(self, program: Program, budget: Budget, enough: int | None = None) -> None:
        self.best = program
        self.queries = budget.queries
        self._deadline = time.monotonic() + budget.seconds
        self._enough = enough

    @property
    def is_over(self) -> bool:
        if self._enough is not None and self.best.bytes <= self._enough:
            return True
        return self.queries <= 0 or time.monotonic() > self._deadline

    def offer(self, candidate: Program | None) -> bool:
        """Take a candidate if it still fails."""
        if candidate is None or self.is_over:
            return False
        self.queries -= 1
        if not candidate.holds():
            return False
        self.best = candidate
        return True


def shrunk(program: Program, budget: Budget | None = None, *, enough: int | None = None) -> Program:
    """A smaller program that fails in the same way, or the same one.

    Args:
        program: One that fails.
        budget: When to stop.
        enough: Stop as soon as it takes no more bytes than this.
    """
    shrinker = Shrinker(program, budget or Budget(), enough)
    if not program.holds():
        return program
    passes: list[Callable[[Shrinker], None]] = [
        _plain_layouts,
        _constant_values,
        _drop_list_members,
        _crop,
        _squeeze,
        _constant_values,
        _simple_backward,
        _drop_gradients,
        _round_values,
        _single_values,
    ]
    for shrink in passes:
        if shrinker.is_over:
            break
        shrink(shrinker)
    return shrinker.best


def _plain_layouts(shrinker: Shrinker) -> None:
    for given in shrinker.best.inputs:
        if given.layout:
            shrinker.offer(shrinker.best.with_input(given.name, layout="", order=()))


def _drop_gradients(shrinker: Shrinker) -> None:
    recipe = shrinker.best.recipe
    if isinstance(recipe.outcome, Raises) and any("backward" in line.target for line in recipe.lines):
        return  # that there was a graph is the point
    for given in shrinker.best.inputs:
        if given.grad == "no" or shrinker.offer(shrinker.best.with_input(given.name, grad="no")):
            continue
        if given.grad != "leaf":
            shrinker.offer(shrinker.best.with_input(given.name, grad="leaf"))


def _constant_values(shrinker: Shrinker) -> None:
    """Where only shapes and types matter, as in most exceptions, values are noise."""
    if not isinstance(shrinker.best.recipe.outcome, Raises):
        _constant_where_all_are(shrinker)
        return
    for given in shrinker.best.inputs:
        if given.fill is None:
            value = False if given.dtype == "bool" else 0
            shrinker.offer(shrinker.best.with_fill(given.name, value))


def _constant_where_all_are(shrinker: Shrinker) -> None:
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        if given.fill is not None or tensor.is_complex() or tensor.numel() < 2:
            continue
        first = tensor.flatten()[0]
        if bool((tensor == first).all()):
            shrinker.offer(shrinker.best.with_fill(given.name, first.item()))
        elif tensor.is_floating_point() and bool((tensor > 0).all()):
            shrinker.offer(shrinker.best.with_fill(given.name, 1.0))


# Shapes


def _drop_list_members(shrinker: Shrinker) -> None:
    """Of the tensors that `cat` or `stack` is given, most are innocent."""
    for at, line in enumerate(shrinker.best.recipe.lines):
        for position, argument in enumerate(line.args):
            if isinstance(argument, Many) and len(argument.items) > 1 and isinstance(argument.items[0], Ref):
                member = len(argument.items) - 1
                while member >= 0 and not shrinker.is_over:
                    shrinker.offer(_without_member(shrinker.best, at, position, member))
                    member -= 1


def _without_member(program: Program, at: int, position: int, member: int) -> Program | None:
    line = program.recipe.lines[at]
    argument = line.args[position]
    if not isinstance(argument, Many) or len(argument.items) < 2:
        return None
    items = argument.items[:member] + argument.items[member + 1 :]
    args = (*line.args[:position], msgspec.structs.replace(argument, items=items), *line.args[position + 1 :])
    lines = list(program.recipe.lines)
    lines[at] = msgspec.structs.replace(line, args=args)
    return _without_unused(program.with_recipe(lines=tuple(lines)))


def _without_unused(program: Program) -> Program:
    used = {name for line in program.recipe.lines for name in _names(line)}
    return program.with_recipe(inputs=tuple(given for given in program.inputs if given.name in used))


def _names(line: Line) -> Iterator[str]:
    pending = [*line.args, *line.kwargs.values()]
    while pending:
        argument = pending.pop()
        if isinstance(argument, Ref):
            yield argument.name
        elif isinstance(argument, Many):
            pending.extend(argument.items)


Place = tuple[str, int]  # an input and one of its dimensions


def _crop(shrinker: Shrinker) -> None:
    """Halve dimensions that seem to belong together, as long as the failure is in one of the halves."""
    tried: set[tuple[frozenset[Place], tuple[int, ...]]] = set()
    progress = True
    while progress and not shrinker.is_over:
        progress = False
        for group in _groups(shrinker.best):
            sizes = tuple(shrinker.best.tensors[name].shape[dim] for name, dim in sorted(group))
            if (group, sizes) in tried or min(sizes) < 2:
                continue
            tried.add((group, sizes))
            progress |= _crop_group(shrinker, group, sizes[0])


def _crop_group(shrinker: Shrinker, group: frozenset[Place], size: int) -> bool:
    cropped = False
    while size > 1 and not shrinker.is_over:
        half = size // 2
        # One element is the usual answer, so the ends are tried first.
        spans = [(0, 1), (size - 1, size), (0, half), (half, size), (0, size - 1), (1, size)]
        for start, stop in dict.fromkeys(spans):
            if shrinker.offer(_cropped(shrinker.best, group, start, stop)):
                size = stop - start
                cropped = True
                break
        else:
            break
    return cropped


def _cropped(program: Program, group: frozenset[Place], start: int, stop: int) -> Program:
    changed: dict[str, torch.Tensor] = {}
    for name, dim in group:
        tensor = changed.get(name, program.tensors[name])
        changed[name] = tensor.narrow(dim, start, stop - start)
    smaller = program.with_tensors({name: tensor.contiguous() for name, tensor in changed.items()})
    for given in program.inputs:
        if given.name in changed and given.fill is not None:
            smaller = smaller.with_input(given.name, fill=given.fill)
    return smaller


def _groups(program: Program) -> Iterator[frozenset[Place]]:
    """Dimensions of equal size: all of them, those at one place from the end or from the start, pairs, single ones."""
    places: dict[int, list[Place]] = {}
    dims = {given.name: len(given.shape) for given in program.inputs}
    for given in program.inputs:
        for dim, size in enumerate(given.shape):
            if size > 1:
                places.setdefault(size, []).append((given.name, dim))
    seen: set[frozenset[Place]] = set()
    for size in sorted(places, reverse=True):
        same = places[size]
        groups = [same]
        groups += [[place for place in same if place[1] - dims[place[0]] == at] for at in range(-5, 0)]
        groups += [[place for place in same if place[1] == at] for at in range(5)]
        groups += [[one, other] for number, one in enumerate(same) for other in same[number + 1 :]][:12]
        groups += [[place] for place in same]
        for group in map(frozenset, groups):
            if group and group not in seen:
                seen.add(group)
                yield group


def _squeeze(shrinker: Shrinker) -> None:
    """Dimensions of size one that nobody needs, where all tensors have them: what is left is as easy to read."""
    for _ in range(6):
        ranks = {len(given.shape) for given in shrinker.best.inputs}
        if len(ranks) != 1 or min(ranks) < 2:
            return
        candidates = []
        for dim in (0, -1):
            changed = {
                given.name: shrinker.best.tensors[given.name].squeeze(dim)
                for given in shrinker.best.inputs
                if given.shape and given.shape[dim] == 1 and not given.layout
            }
            if changed:
                candidates.append(changed)
        if not any(shrinker.offer(_reshaped(shrinker.best, changed)) for changed in candidates):
            return


def _reshaped(program: Program, changed: dict[str, torch.Tensor]) -> Program:
    other = program.with_tensors(changed)
    for given in program.inputs:
        if given.name in changed and given.fill is not None:
            other = other.with_input(given.name, fill=given.fill)
    return other


# Values


def _simple_backward(shrinker: Shrinker) -> None:
    """`result.sum().backward()` where the gradient that arrived is not what matters."""
    lines = shrinker.best.recipe.lines
    for at, line in enumerate(lines):
        if line.target == "Tensor.backward" and len(line.args) == 2:
            simple = Line(target="sum_backward", args=line.args[:1], note=line.note)
            changed = (*lines[:at], simple, *lines[at + 1 :])
            shrinker.offer(_without_unused(shrinker.best.with_recipe(lines=changed)))


def _round_values(shrinker: Shrinker) -> None:
    """Whole tensors: ones of the same signs, else fewer digits."""
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


def _single_values(shrinker: Shrinker) -> None:
    """Element by element, where there are few."""
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        if given.fill is not None or tensor.is_complex() or tensor.dtype is torch.bool or tensor.numel() > INLINE:
            continue
        for position in range(tensor.numel()):
            for simple in _simpler(shrinker.best.tensors[given.name].flatten()[position]):
                changed = shrinker.best.tensors[given.name].clone()
                changed.view(-1)[position] = simple
                if shrinker.offer(shrinker.best.with_tensors({given.name: changed})):
                    break
        _constant_where_all_are(shrinker)


def _simpler(value: torch.Tensor) -> list[torch.Tensor]:
    if value.is_floating_point():
        candidates = [_rounded(value, digits) for digits in (0, 1, 2, 3, 4)]
    else:
        whole = int(value.item())
        sign = -1 if whole < 0 else 1
        sizes = sorted({0, 1, 2, 10, 100, 1000, abs(whole) // 2, abs(whole) - 1})
        # A negative index is another mistake than one that is too big.
        candidates = [value.new_tensor(sign * size) for size in sizes if size < abs(whole) and (sign > 0 or size)]
    found: list[torch.Tensor] = []
    for candidate in candidates:
        if bool(candidate == value):
            break
        found.append(candidate)
    return found


def _rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """With so many significant digits; with none, 1 or -1. Zeros, infinities and tiny numbers stay."""
    wide = tensor.double()
    kept = (wide == 0) | ~wide.isfinite() | (wide.abs() < torch.finfo(tensor.dtype).tiny)
    if digits == 0:
        simple = wide.sign()
    else:
        scale = 10.0 ** (digits - 1 - wide.abs().clamp_min(1e-300).log10().floor())
        simple = (wide * scale).round() / scale
    return torch.where(kept, wide, simple).to(tensor.dtype)
