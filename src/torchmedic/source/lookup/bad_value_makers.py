"""Which statement of the user's gave a tensor the bad values that the step found in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchmedic.source.bindings import ENTRY, assignments, header
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.objects.parts import attributes
from torchmedic.source.segment.cut import carried_names

_MAX_ELEMENTS = 1 << 24  # of a table whose rows are compared
_MAX_ROWS = 8  # of a batch


def picked_from(frames: list[Frame], tensor: torch.Tensor) -> Origin | None:
    """Where a variable or an attribute was made that has all rows of a batch and more: the batch was picked by hand."""
    return _made(frames, tensor, _has_rows_of) if tensor.dim() else None


def maker_of(frames: list[Frame], tensor: torch.Tensor) -> Origin | None:
    """The last assignment of a variable of the user's frames that holds the tensor, or shares memory with it.

    Then the only assignment of an attribute of such a variable that does.

    Args:
        frames: Live ones, outermost first.
        tensor: What is looked for, by its memory.
    """
    return _made(frames, tensor, shares_memory)


def _made(frames: list[Frame], tensor: torch.Tensor, fits: Callable[[Any, torch.Tensor], bool]) -> Origin | None:
    variables = [
        (frame, *item) for frame in reversed(frames) if frame.is_user for item in list(frame.variables.items())
    ]
    for frame, name, value in variables:
        if fits(value, tensor):
            made = [node for node in assignments(frame, name) if node is not ENTRY]
            if made:
                return Origin(frame.file, header(made[-1]), name)
    for _, _, owner in variables:
        for attr, value in attributes(owner, type(owner)):
            found = list(attribute_assignments(type(owner), attr)) if fits(value, tensor) else []
            if len(found) == 1:
                return Origin(found[0][0], found[0][1], f"self.{attr}")
    return None


def _has_rows_of(value: Any, batch: torch.Tensor) -> bool:
    """Whether a tensor or an array has each row of a batch, and others. Only values in host memory are read."""
    try:
        if not (isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")) or not batch.is_cpu:
            return False
        table = torch.as_tensor(value)
        if table.shape[1:] != batch.shape[1:] or len(table) <= len(batch) or table.numel() > _MAX_ELEMENTS:
            return False
        if table.is_floating_point() is not batch.is_floating_point():
            return False  # bytes and counts are scaled where they are converted
        rows, wanted = table.detach().to(batch.dtype).flatten(1 if batch.dim() > 1 else 0), batch.detach()
        return all(bool((rows == row.reshape(-1)).reshape(len(rows), -1).all(1).any()) for row in wanted[:_MAX_ROWS])
    except Exception:  # whatever a variable of the user's does when it is looked at
        return False


def shares_memory(value: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor or an array is stored where the other one is."""
    try:
        if isinstance(value, torch.Tensor):
            return bool(value.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
        interface = getattr(value, "__array_interface__", None)
        if isinstance(interface, dict):
            start = interface["data"][0]
            memory = tensor.untyped_storage()
            return bool(start and memory.data_ptr() <= start < memory.data_ptr() + max(1, memory.nbytes()))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError):
        return False
    return False


def is_next_state(step: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor is the next value of a state: a variable that the step reads, and has already assigned."""
    if step is None:
        return False
    names = carried_names(step.frame, step.frame.f_lineno)
    return any(shares_memory(step.frame.f_locals.get(name), tensor) for name in names)
