"""What the names stand for that a segment refers to once it has been made runnable on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchmedic.source.segment.standalone import AWAIT, END, RETURNED


class SegmentEnd(Exception):
    """The segment ran into its own `return`, `break` or `continue`."""


class Waits(Exception):
    """A statement awaits something outside of the step."""


def go_backward(returned: Any) -> None:
    """Call backward for what a function returned: a loss, several values with the loss first, or `loss` among others.

    Raises:
        TypeError: There is no loss in it.
    """
    loss = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(loss, torch.Tensor):
        loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise TypeError("the function returned no loss")
    loss.backward()


def run_to_end(awaitable: Any) -> Any:
    """The result of a coroutine that never really waits."""
    iterator = awaitable.__await__()
    try:
        next(iterator)
    except StopIteration as end:
        return end.value
    raise Waits


NAMES: dict[str, Any] = {END: SegmentEnd, AWAIT: run_to_end, RETURNED: go_backward}
