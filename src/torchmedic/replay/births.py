"""From a bad value back to where it was born: an operation, or a tensor that the step found there already bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torchmedic.replay.microscope import Leaf, Microscope, Op


class Birth:
    """The origin of a non-finite value that reached the loss or a gradient."""

    def __init__(self, *, op: Op | None = None, leaf: Leaf | None = None, kind: str, spoiled: Op | None = None) -> None:
        self.op = op
        self.leaf = leaf
        self.kind = kind  # "nan" or "inf"
        self.spoiled = spoiled  # where an infinity became NaN later, if it did

    @property
    def number(self) -> int:
        return self.op.index if self.op is not None else -1


def births(scope: Microscope, targets: Iterable[int | Leaf]) -> list[Birth]:
    """Where the bad values of the targets come from, earliest first.

    A NaN is followed back through NaN values. If the operation that made it had infinite inputs, those are followed
    on, unless they were put there on purpose (a mask filled with -inf): then the operation itself is the origin.
    """
    found: dict[object, Birth] = {}
    for target in targets:
        value = scope.magnitude(target)
        if math.isnan(value):
            for birth in _follow(scope, target, math.isnan, "nan"):
                for older in _older(scope, birth):
                    found.setdefault(older.number if older.op is not None else id(older.leaf), older)
        elif math.isinf(value):
            for birth in _follow(scope, target, math.isinf, "inf"):
                found.setdefault(birth.number if birth.op is not None else id(birth.leaf), birth)
    return sorted(found.values(), key=lambda birth: birth.number)


def _follow(scope: Microscope, start: int | Leaf, is_bad: Callable[[float], bool], kind: str) -> list[Birth]:
    """All origins of one kind of bad value behind `start`."""
    origins: list[Birth] = []
    pending: list[int | Leaf] = [start]
    seen: set[int] = set()
    while pending:
        source = pending.pop()
        if isinstance(source, Leaf):
            origins.append(Birth(leaf=source, kind=kind))
            continue
        if source in seen:
            continue
        seen.add(source)
        op = scope.ops[source]
        bad = [given for given in op.inputs if given != source and is_bad(scope.magnitude(given))]
        if bad:
            pending.extend(bad)
        else:
            origins.append(Birth(op=op, kind=kind))
    return origins


def _older(scope: Microscope, birth: Birth) -> list[Birth]:
    """The infinities behind a NaN, where they were not meant; else the NaN's own birth."""
    if birth.op is None:
        return [birth]
    infinite = [given for given in birth.op.inputs if math.isinf(scope.magnitude(given))]
    roots: list[Birth] = []
    for given in infinite:
        for root in _follow(scope, given, math.isinf, "inf"):
            if root.op is not None and root.op.explicit:
                continue  # somebody wrote this infinity down
            roots.append(Birth(op=root.op, leaf=root.leaf, kind="inf", spoiled=birth.op))
    deliberate = [root for root in roots if root.leaf is not None and _is_mask(root.leaf)]
    roots = [root for root in roots if root not in deliberate]
    return roots or [birth]


def _is_mask(leaf: Leaf) -> bool:
    """A tensor of zeros and -inf is an attention mask, made for its infinities."""
    tensor = leaf.tensor
    if tensor.requires_grad or not tensor.is_floating_point():
        return False
    return bool(((tensor == 0) | (tensor == -math.inf)).all().item())
