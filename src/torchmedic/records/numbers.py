"""How a bad number travelled through a step, and which cures did not help: for the pictures of a report."""

from __future__ import annotations

from typing import Literal

import msgspec

Badness = Literal["nan", "inf", ""]


class PathNode(msgspec.Struct, frozen=True, kw_only=True):
    """An operation on the way of a bad number, in the order in which the operations ran.

    `role` is `birth` for the operation that made the number, `spoiled` where an infinity became NaN, `leaf` for a
    tensor that was bad before the step (then `operation` is its name), and `end` for the loss or the gradient. `made`
    is what the operation gave, `given` are the largest magnitudes of its inputs, None for those that are not finite.
    """

    operation: str
    role: Literal["birth", "spoiled", "leaf", "way", "end"] = "way"
    backward: bool = False
    made: Badness = ""
    given: tuple[float | None, ...] = ()
    file: str = ""
    line: int = 0
    code: str = ""
    skipped: int = 0  # operations between the node before and this one that are left out


class TriedCure(msgspec.Struct, frozen=True, kw_only=True):
    """A cure with which the step was run again without success."""

    title: str
    result: str
    patch: str = ""


class NumberTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A line of kind `number-trace` in events.jsonl; it belongs to the diagnosis with this code and step."""

    code: str
    step: int | None = None
    path: tuple[PathNode, ...] = ()
    tried: tuple[TriedCure, ...] = ()
