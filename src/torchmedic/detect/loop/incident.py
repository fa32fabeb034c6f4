"""A mistake in the loop, as the ledger shows it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from torchmedic.source.spots import Place

Kind = Literal[
    "never cleared",
    "cleared inside",
    "cleared before step",
    "stale",
    "clipped scaled",
    "not divided",
    "schedule first",
    "schedule per batch",
    "zero rate",
    "eval mode",
    "train mode",
    "same batch",
    "sorted labels",
    "same randomness",
    "empty cache",
    "needless wait",
    "growing graph",
    "leftovers",
    "dropout in evaluation",
    "unregistered",
    "replaced",
    "other parameters",
    "frozen",
]


class LoopIncident(msgspec.Struct, frozen=True, kw_only=True):
    """One habit that cannot be meant.

    `cause` is the line to change or to look at, `others` are places that belong to it, by what they are. `optimizer` is
    the number of the optimizer in the ledger, 0 for none.
    """

    kind: Kind
    step: int
    cause: Place
    optimizer: int = 0
    others: dict[str, Place] = {}
    facts: dict[str, Any] = {}
