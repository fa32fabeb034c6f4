"""Makes a failing program smaller, as property-based testing does: change it, keep the change if it still fails.

The cause of the failure must stay the same. So zeros are neither added nor removed, signs and infinities stay, no
dimension becomes empty, and infinity must not turn into NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch

from torchmedic.repro import values
from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Line, Many, Raises, Ref
from torchmedic.repro.search import Budget, Shrinker

Place = tuple[str, int]  # an input and one of its dimensions


def shrunk(program: Program, budget: Budget | None = None, *, enough: int | None = None) -> Program:
    """A smaller program that fails in the same way, or the program itself."""
    shrinker = Shrinker(program, budget or Budget(), enough)
    if not program.holds():
        return program
    passes: list[Callable[[Shrinker], None]] = [
        _plain_settings,
        _plain_layouts,
        values.constant,
        _drop_arguments,
        _drop_list_members,
        crop,
        squeeze,
        values.constant,
        _simple_backward,
        _drop_gradients,
        values.rounded,
        values.one_by_one,
    ]
    for shrink in passes:
        if shrinker.is_over:
            break
        shrink(shrinker)
    return shrinker.best


def _plain_settings(shrinker: Shrinker) -> None:
    if shrinker.best.recipe.autocast:
        shrinker.offer(shrinker.best.with_recipe(autocast=""))
    if shrinker.best.recipe.deterministic:
        shrinker.offer(shrinker.best.with_recipe(deterministic=False))


def _plain_layouts(shrinker: Shrinker) -> None:
    for given in shrinker.best.inputs:
        if given.layout:
            shrinker.offer(shrinker.best.with_input(given.name, layout="", order=()))


def _drop_gradients(shrinker: Shrinker) -> None:
    recipe = shrinker.best.recipe
    if isinstance(recipe.outcome, Raises) and any("backward" in line.target for line in recipe.lines):
        return  # the failure needs the graph
    for given in shrinker.best.inputs:
        if given.grad == "no" or shrinker.offer(shrinker.best.with_input(given.name, grad="no")):
            continue
        if given.grad != "leaf":
            shrinker.offer(shrinker.best.with_input(given.name, grad="leaf"))


def _drop_arguments(shrinker: Shrinker) -> None:
    """Drop arguments that the failing call does not need, such as a bias."""
    at = len(shrinker.best.recipe.lines) - 1
    if not isinstance(shrinker.best.recipe.outcome, Raises) or "backward" in shrinker.best.recipe.lines[at].target:
        return  # a default could be another reason for NaN, and in a sub-graph the call itself does not fail
    for key in list(shrinker.best.recipe.lines[at].kwargs):
        line = shrinker.best.recipe.lines[at]
        rest = {name: value for name, value in line.kwargs.items() if name != key}
        shrinker.offer(_with_line(shrinker.best, at, msgspec.structs.replace(line, kwargs=rest)))
    if shrinker.best.recipe.lines[at].target.startswith("Tensor."):
        return  # the arguments of methods such as `view` are no defaults
    while len(args := shrinker.best.recipe.lines[at].args) > 1:
        line = msgspec.structs.replace(shrinker.best.recipe.lines[at], args=args[:-1])
        if line.target.startswith("operator.") or not shrinker.offer(_with_line(shrinker.best, at, line)):
            break


def _drop_list_members(shrinker: Shrinker) -> None:
    """Drop tensors from the list of `cat` or `stack` that the failure does not need."""
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
    return _with_line(program, at, msgspec.structs.replace(line, args=args))


def _simple_backward(shrinker: Shrinker) -> None:
    """Use `result.sum().backward()` if the incoming gradient does not matter."""
    lines = shrinker.best.recipe.lines
    for at, line in enumerate(lines):
        if line.target == "Tensor.backward" and len(line.args) == 2:
            simple = Line(target="sum_backward", args=line.args[:1], note=line.note)
            shrinker.offer(_with_line(shrinker.best, at, simple))


def _with_line(program: Program, at: int, line: Line) -> Program:
    lines = program.recipe.lines
    return _without_unused(program.with_recipe(lines=(*lines[:at], line, *lines[at + 1 :])))


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


def crop(shrinker: Shrinker) -> None:
    """Crop groups of dimensions that seem to belong together, as long as the program still fails."""
    culprits = _culprits(shrinker)
    tried: set[tuple[frozenset[Place], tuple[int, ...]]] = set()
    progress = True
    while progress and not shrinker.is_over:
        progress = False
        for group in _groups(shrinker.best):
            sizes = tuple(shrinker.best.tensors[name].shape[dim] for name, dim in sorted(group))
            if (group, sizes) in tried or min(sizes) < 2:
                continue
            tried.add((group, sizes))
            progress |= _crop_group(shrinker, group, sizes[0], culprits)


def _culprits(shrinker: Shrinker) -> dict[str, list[int]]:
    """Index values that fail by themselves. These must stay, because in a smaller table every index is out of range."""
    found = {}
    for given in shrinker.best.inputs:
        tensor = shrinker.best.tensors[given.name]
        is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        if isinstance(shrinker.best.recipe.outcome, Raises) and is_index and given.fill is None and tensor.numel():
            ends = dict.fromkeys((int(tensor.min()), int(tensor.max())))
            bad = [end for end in ends if shrinker.still_fails(shrinker.best.with_fill(given.name, end))]
            if bad:
                found[given.name] = bad
    return found


def _crop_group(shrinker: Shrinker, group: frozenset[Place], size: int, culprits: dict[str, list[int]]) -> bool:
    cropped = False
    while size > 1 and not shrinker.is_over:
        half = size // 2
        # Usually one element is enough, so the ends are tried first.
        spans = [(0, 1), (size - 1, size), (0, half), (half, size), (0, size - 1), (1, size)]
        for start, stop in dict.fromkeys(spans):
            candidate = _cropped(shrinker.best, group, start, stop)
            if _has(candidate, culprits) and shrinker.offer(candidate):
                size = stop - start
                cropped = True
                break
        else:
            break
    return cropped


def _has(program: Program, culprits: dict[str, list[int]]) -> bool:
    return all(
        bool(torch.isin(program.tensors[name], torch.tensor(values, device="cpu")).any())
        for name, values in culprits.items()
        if name in program.tensors
    )


def _cropped(program: Program, group: frozenset[Place], start: int, stop: int) -> Program:
    changed: dict[str, torch.Tensor] = {}
    for name, dim in group:
        tensor = changed.get(name, program.tensors[name])
        changed[name] = tensor.narrow(dim, start, stop - start)
    return program.with_shapes({name: tensor.contiguous() for name, tensor in changed.items()})


def _groups(program: Program) -> Iterator[frozenset[Place]]:
    """Groups of dimensions of equal size: all, those at one position from the end or the start, pairs, single ones."""
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


def squeeze(shrinker: Shrinker) -> None:
    """Remove dimensions of size one that all tensors have and that the failure does not need."""
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
        if not any(shrinker.offer(shrinker.best.with_shapes(changed)) for changed in candidates):
            return
