"""The models of a rank, one for each optimizer: how large their weights were before the first update and later."""

from __future__ import annotations

import weakref
from collections.abc import Container
from types import FrameType
from typing import Any

import msgspec
import torch

from torchmedic.observe.ranks.samples import line_of, size_of
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records.rank_facts import TrainedModel
from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.user_code import user_frame

_MAX_MODELS = 4
_MAX_WEIGHTS = 4  # of each


class Models:
    """Knows the optimizers of the first updates. Only weights on the CPU are read: others would be waited for."""

    def __init__(self) -> None:
        self._known: WeakTable[_Known] = WeakTable()
        self._count = 0

    def begins(self, optimizer: Any, frame: FrameType, wrapped: Container[int]) -> None:
        """One of the first updates begins. `wrapped` are the identities of the parameters in wrapped models."""
        known = self._known.get(optimizer)
        if known is not None:
            known.turns += 1
        elif self._count < _MAX_MODELS:
            self._count += 1
            known = _model_of(optimizer, frame, wrapped)
            if known is not None:
                self._known[optimizer] = known

    def sampled(self) -> tuple[TrainedModel, ...]:
        """All models with the present sizes of their weights; nothing where there is one model."""
        known = [each for optimizer in self._known.alive() if (each := self._known.get(optimizer)) is not None]
        if len(known) < max(2, self._count):
            return ()
        found = []
        for each in known:
            weights = [weight for reference in each.weights if (weight := reference()) is not None]
            if len(weights) < len(each.weights) or not all(weight.is_cpu for weight in weights):
                return ()
            found.append(msgspec.structs.replace(each.told, turns=each.turns, last=tuple(map(size_of, weights))))
        return tuple(found)


class _Known:
    __slots__ = ("told", "turns", "weights")

    def __init__(self, told: TrainedModel, weights: list[torch.Tensor]) -> None:
        self.told = told
        self.weights = [weakref.ref(each) for each in weights]
        self.turns = 1


def _model_of(optimizer: Any, frame: FrameType, wrapped: Container[int]) -> _Known | None:
    plain = [each for each in parameters_of(optimizer) if _is_plain(each)]
    chosen = plain[:: max(1, -(-len(plain) // _MAX_WEIGHTS))]
    if not chosen or not all(each.is_cpu for each in chosen):
        return None
    told = TrainedModel(
        updating=line_of(user_frame(frame)),
        shapes=tuple(tuple(each.shape) for each in chosen),
        nbytes=sum(each.numel() * each.element_size() for each in plain if each.requires_grad),
        is_wrapped=any(id(each) in wrapped for each in plain),
        start=tuple(map(size_of, chosen)),
    )
    return _Known(told, chosen)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and bool(tensor.numel()) and tensor.is_floating_point()
