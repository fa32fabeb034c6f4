"""Answers to the exchanges of a replay, which has no other ranks: what this rank sends stands in for what they send.

Only calls that every rank makes with the same kind of values are answered: `all_gather`, `all_reduce` and `barrier`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Done:
    """A call that is complete."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def answer(method: str, size: int, args: tuple[Any, ...]) -> _Done | None:
    """Do what a method of a process group does, as if all ranks had passed the same; None for other methods."""
    if method == "allreduce":
        operation, kinds = args[1].reduceOp, torch.distributed.ReduceOp
        if not any(operation == kind for kind in (kinds.SUM, kinds.AVG, kinds.MAX, kinds.MIN)):
            return None
        for tensor in args[0] if operation == kinds.SUM else ():
            tensor.data.mul_(size)
    elif method == "allgather" and all(_fit(given, parts) for parts, given in zip(args[0], args[1], strict=True)):
        for parts, given in zip(args[0], args[1], strict=True):
            _fill(parts, given)
    elif method in ("_allgather_base", "all_gather_single") and args[0].numel() == size * args[1].numel():
        _fill(args[0].data.view(size, *args[1].shape), args[1])
    elif method != "barrier":
        return None
    return _Done()


def _fit(given: Tensor, parts: list[Tensor]) -> bool:
    return all(part.shape == given.shape for part in parts)


def _fill(parts: Any, given: Tensor) -> None:
    for part in parts:
        part.data.copy_(given.data)
