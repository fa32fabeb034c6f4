"""The way of a bad number from its birth to the loss or the gradient, as far as a picture can show it."""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import replace

from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records.numbers import Badness, PathNode
from torchmedic.replay.step.trial import source_of
from torchmedic.replay.trace.bad_value_origins import Birth
from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.source.user_code import relative

_MAX_NODES = 12
_MAX_CODE = 80  # characters
_MAX_INPUTS = 4
# Operations that hand values on as they are; a reader needs to see none of them.
_PLAIN = frozenset(
    "view reshape transpose t permute expand unsqueeze squeeze detach clone alias copy to_copy slice select as_strided "
    "unsafe_view contiguous".split()
)


def path_of(evidence: NumbersEvidence) -> tuple[PathNode, ...]:
    """The operations from the birth of the first bad number to where it was noticed; empty if the birth is unknown."""
    birth, scope = evidence.birth, evidence.scope
    if birth is None or scope is None:
        return ()
    nodes = [_first(birth, evidence, scope)]
    way = [scope.ops[index] for index in reversed(birth.path)]
    shown = [op for op in way if op.kind not in _PLAIN or op is birth.spoiled]
    for op in shown:
        nodes.append(_node(op, scope, "spoiled" if op is birth.spoiled else "way"))
    kept = _shortened(nodes)
    return (*kept, PathNode(operation=evidence.victim, role="end", made=kept[-1].made))


def _first(birth: Birth, evidence: NumbersEvidence, scope: Microscope) -> PathNode:
    if birth.op is not None:
        return _node(birth.op, scope, "birth")
    assert birth.leaf is not None
    kind, name = evidence.name_of(birth.leaf)
    return PathNode(operation=f"{kind} {name}".strip(), role="leaf", made="nan" if birth.kind == "nan" else "inf")


def _node(op: Op, scope: Microscope, role: Literal["birth", "spoiled", "way"]) -> PathNode:
    spot = scope.spot_of(op)
    given = [scope.magnitude(value) for value in op.inputs[:_MAX_INPUTS] if value.magnitude >= 0]
    return PathNode(
        operation=op.kind,
        role=role,
        backward=op.is_backward,
        made=_badness([scope.magnitude(value) for value in op.outputs]),
        given=tuple(float(f"{value:.4g}") if math.isfinite(value) else None for value in given),
        file=relative(spot.file) if spot is not None else "",
        line=spot.line if spot is not None else 0,
        code=" ".join(source_of(spot).split())[:_MAX_CODE] if spot is not None else "",
    )


def _badness(magnitudes: list[float]) -> Badness:
    if any(map(math.isnan, magnitudes)):
        return "nan"
    return "inf" if any(map(math.isinf, magnitudes)) else ""


def _shortened(nodes: list[PathNode]) -> list[PathNode]:
    """The first and the last nodes; the first of the last ones says how many are left out."""
    if len(nodes) <= _MAX_NODES:
        return nodes
    half = _MAX_NODES // 2
    first, last = nodes[:half], nodes[-half:]
    return [*first, replace(last[0], skipped=len(nodes) - 2 * half), *last[1:]]
