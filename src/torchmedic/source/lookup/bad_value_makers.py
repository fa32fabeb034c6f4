"""Which statement of the user's gave a tensor the bad values that the step found in it."""

from __future__ import annotations

from typing import Any

import torch

from torchmedic.source.bindings import ENTRY, assignments, header
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.origins import Origin, attribute_assignments
from torchmedic.source.objects.parts import attributes
from torchmedic.source.segment.cut import carried_names


def maker_of(frames: list[Frame], tensor: torch.Tensor) -> Origin | None:
    """The last assignment of a variable of the user's frames that holds the tensor, or shares memory with it.

    Then the only assignment of an attribute of such a variable that does.

    Args:
        frames: Live ones, outermost first.
        tensor: What is looked for, by its memory.
    """
    variables = [
        (frame, *item) for frame in reversed(frames) if frame.is_user for item in list(frame.variables.items())
    ]
    for frame, name, value in variables:
        if shares_memory(value, tensor):
            made = [node for node in assignments(frame, name) if node is not ENTRY]
            if made:
                return Origin(frame.file, header(made[-1]), name)
    for _, _, owner in variables:
        for attr, value in attributes(owner, type(owner)):
            found = list(attribute_assignments(type(owner), attr)) if shares_memory(value, tensor) else []
            if len(found) == 1:
                return Origin(found[0][0], found[0][1], f"self.{attr}")
    return None


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
