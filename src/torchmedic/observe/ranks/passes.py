"""The passes of a rank over its data: whether two of them have had the same order."""

from __future__ import annotations

from typing import Any

import torch


class Passes:
    """The passes over the data of one `DistributedSampler`, by the epoch that it was told."""

    def __init__(self) -> None:
        self._trained: set[int] = set()  # epochs of earlier passes
        self._epoch = -1
        self._is_counted = True

    def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._is_counted = False

    def trained(self) -> bool:
        """The weights were updated in this pass; whether an earlier pass had the same order."""
        if self._is_counted:
            return False
        self._is_counted = True
        is_again = self._epoch in self._trained
        self._trained.add(self._epoch)
        return is_again


def sampler_of(iterator: Any) -> Any:
    drawn_by = getattr(iterator, "_index_sampler", None)
    return getattr(drawn_by, "sampler", drawn_by)


def has_epoch(sampler: Any) -> bool:
    """Whether a sampler shuffles by its `epoch`, which somebody must set."""
    kind = torch.utils.data.distributed.DistributedSampler
    return isinstance(sampler, kind) and bool(sampler.shuffle) and sampler.num_replicas > 1
