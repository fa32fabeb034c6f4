"""Smaller shapes: dimensions that belong together are cropped as long as the program still fails."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchmedic.repro.program import Program
from torchmedic.repro.recipe import Raises
from torchmedic.repro.search import Shrinker

Place = tuple[str, int]  # an input and one of its dimensions


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
