"""Models that give results without gradients, in training mode, while another model is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from torchmedic.observe.loop.reach import Ownerless
from torchmedic.source.spots import Place

_MAX_MODELS = 4
_MAX_TENSORS = 16  # of a state


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
        self.loaded: dict[int, frozenset[int]] = {}  # where the tensors of a state lay that was loaded

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

    def loading(self, state: Any, number: int) -> None:
        """A state is loaded into a module: note where its tensors lie."""
        values = list(state.values())[:_MAX_TENSORS] if isinstance(state, Mapping) else []
        self.loaded[number] = frozenset(_memory_of(values))

    def is_loaded(self, number: int, trained: Iterable[torch.Tensor]) -> bool:
        """Whether a module was given weights from elsewhere, and not those of a model that is trained now."""
        memory = self.loaded.get(number, frozenset())
        return bool(memory) and memory.isdisjoint(_memory_of(trained))


def _memory_of(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
            yield value.data_ptr()
