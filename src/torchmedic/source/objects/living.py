"""The objects of a kind that Python knows of. What only C++ holds is not among them."""

from __future__ import annotations

import gc
from typing import TypeVar

import torch

Kind = TypeVar("Kind")


def living(kind: type[Kind]) -> list[Kind]:
    # By its type alone: `isinstance` would ask objects of the user's for their `__class__`.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def live_modules() -> list[torch.nn.Module]:
    """Every module. Those whose constructor has not run, or failed, are left out."""
    return [each for each in living(torch.nn.Module) if "_modules" in each.__dict__]
