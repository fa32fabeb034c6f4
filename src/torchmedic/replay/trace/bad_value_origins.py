"""From a bad value back to where it was born: an operation, or a tensor that the step found there already bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torchmedic.replay.trace.microscope import Leaf, Microscope, Op, Value

# What stood in the memory before does not matter to these.
_OVERWRITING = frozenset("copy_ fill_ zero_ uniform_ normal_ bernoulli_ exponential_ random_ set_ set_data".split())


class Birth:
    """The origin of a non-finite value that reached the loss or a gradient."""

    def __init__(
        self,
        *,
        kind: str,
        op: Op | None = None,
        leaf: Leaf | None = None,
        spoiled: Op | None = None,
        path: tuple[int, ...] = (),
    ) -> None:
        self.op = op
        self.leaf = leaf
        self.kind = kind  # "nan" or "inf"
        self.spoiled = spoiled  # where an infinity became NaN later, if it did
        self.path = path  # the operations between the origin and the loss or gradient, that one first

    @property
    def number(self) -> int:
        return self.op.index if self.op is not None else -1

    @property
    def key(self) -> object:
        return self.number if self.op is not None else id(self.leaf.tensor) if self.leaf is not None else None


def births(scope: Microscope, targets: Iterable[Value]) -> list[Birth]:
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
                    found.setdefault(older.key, older)
        elif math.isinf(value):
            for birth in _follow(scope, target, math.isinf, "inf"):
                found.setdefault(birth.key, birth)
    return sorted((_in_forward(scope, birth) for birth in found.values()), key=lambda birth: _time_of(scope, birth))


def _time_of(scope: Microscope, birth: Birth) -> int:
    """The number of the operation; for a tensor that `torch.tensor` made in the step, that of the first reader."""
    leaf = birth.leaf
    return leaf.reader if leaf is not None and scope.ops[leaf.reader].name == "lift_fresh" else birth.number


def _in_forward(scope: Microscope, birth: Birth) -> Birth:
    """A gradient that is bad because the forward operation's own result was: then that is the birth."""
    if birth.op is None or not birth.op.derived:
        return birth
    forward = scope.forward_of(birth.op)
    results = [scope.magnitude(value) for value in forward.outputs]
    if forward.derived or all(map(math.isfinite, results)):
        return birth
    if not all(math.isfinite(scope.magnitude(value)) for value in _read_by(forward)):
        return birth
    kind = "nan" if any(map(math.isnan, results)) else "inf"
    return Birth(op=forward, kind=kind, spoiled=birth.op, path=birth.path)


def _follow(
    scope: Microscope, start: Value, is_bad: Callable[[float], bool], kind: str, path: tuple[int, ...] = ()
) -> list[Birth]:
    """All origins of one kind of bad value behind `start`."""
    origins: list[Birth] = []
    first = scope.source(start, is_bad)
    pending: list[tuple[int | Leaf, int | None]] = [] if first is None else [(first, None)]
    reached_from: dict[int, int | None] = {}
    while pending:
        source, after = pending.pop()
        if isinstance(source, Leaf):
            origins.append(Birth(leaf=source, kind=kind, path=path + _path(reached_from, after)))
            continue
        if source in reached_from:
            continue
        reached_from[source] = after
        op = scope.ops[source]
        sources = [
            given
            for value in _read_by(op)
            if is_bad(scope.magnitude(value)) and (given := scope.source(value, is_bad)) not in (None, source)
        ]
        made = [given for given in sources if isinstance(given, Leaf) or not scope.ops[given or 0].is_uninitialised]
        behind = made or sources
        if behind:
            pending.extend((given, source) for given in behind if given is not None)
        else:
            origins.append(Birth(op=op, kind=kind, path=path + _path(reached_from, after)))
    return origins


def _path(reached_from: dict[int, int | None], last: int | None) -> tuple[int, ...]:
    """The operations from the target to `last`."""
    steps: list[int] = []
    while last is not None:
        steps.append(last)
        last = reached_from[last]
    return tuple(reversed(steps))


def _read_by(op: Op) -> list[Value]:
    return op.inputs[1:] if op.name in _OVERWRITING else op.inputs


def _older(scope: Microscope, birth: Birth) -> list[Birth]:
    """The infinities behind a NaN, where they were not meant; else the NaN's own birth."""
    if birth.op is None:
        return [birth]
    roots: list[Birth] = []
    for value in _read_by(birth.op):
        if not math.isinf(scope.magnitude(value)):
            continue
        for root in _follow(scope, value, math.isinf, "inf", (*birth.path, birth.op.index)):
            if not is_deliberate(root):
                roots.append(Birth(op=root.op, leaf=root.leaf, kind="inf", spoiled=birth.op, path=root.path))
    return roots or [birth]


def is_deliberate(root: Birth) -> bool:
    """Whether an infinity was written down by somebody: as a constant, or as a mask."""
    if root.op is not None:
        return root.op.explicit
    return root.leaf is not None and _is_mask(root.leaf)


def _is_mask(leaf: Leaf) -> bool:
    """A tensor of zeros and -inf is an attention mask, made for its infinities."""
    tensor = leaf.tensor
    if tensor.requires_grad or not tensor.is_floating_point():
        return False
    return bool(((tensor == 0) | (tensor == -math.inf)).all().item())
