"""Models that give results without gradients, in training mode, while another model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torchmedic.observe.loop.reach import Ownerless
from torchmedic.source.spots import Place

_MAX_MODELS = 4


class Teacher:
    """`first` and `last` are the updates at which it was called, `calls` how often the number of updates was new."""

    def __init__(self, weight: Ownerless, place: Place) -> None:
        self.weight = weight
        self.place = place
        self.last = weight.step
        self.calls = 1


class Teachers:
    """By the number of a module."""

    def __init__(self) -> None:
        self.found: dict[int, Teacher] = {}
        self.loaded: set[int] = set()  # modules that were given weights from elsewhere

    def forward(self, module: torch.nn.Module, number: int, place: Place, step: int) -> None:
        """A module was called in training mode, without gradients."""
        known = self.found.get(number)
        if known is not None:
            known.calls += step > known.last
            known.last = step
        elif len(self.found) < _MAX_MODELS:
            weights = [each for each in module.parameters() if each.is_floating_point() and not each.is_meta]
            weights = [each for each in weights if each.requires_grad] or weights
            if weights and type(weights[-1]) in (torch.Tensor, torch.nn.Parameter):
                self.found[number] = Teacher(Ownerless(weights[-1], step, is_between=False), place)

    def loading(self, state: Any, number: int, trained: list[torch.Tensor]) -> None:
        """A state is loaded into a module. The weights of a model that is trained make an average, or a target."""
        memory = {tensor.data_ptr() for tensor in trained if type(tensor) is torch.nn.Parameter}
        values = list(state.values()) if isinstance(state, Mapping) else []
        if values and not any(type(value) is torch.Tensor and value.data_ptr() in memory for value in values):
            self.loaded.add(number)
        else:
            self.loaded.discard(number)
