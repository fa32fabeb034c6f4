"""Tensors that a step finds: their names, and weights that are already NaN, replaced for a while.

The step is then run as it might have been one step before.

A gradient of a finite loss that is not finite is noticed on a GPU only when the weights are spoiled. Where a copy of an
earlier step was kept, they are exchanged for it. Else something plausible stands in: what made the bad gradient is most
often in the data and the formula, and not in the values of the weights, so that it shows again with other ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchmedic.observe.numbers.weight_copies import Original
from torchmedic.replay.isolation.torch_state import set_version
from torchmedic.replay.step.runner import Runner
from torchmedic.replay.trace.operations import storage_of
from torchmedic.source.objects.finite import is_finite


class ExchangedWeights:
    """Earlier weights in place of the present ones, and finite values where those are not finite, until put back.

    Args:
        runner: Knows the weights and buffers of the step.
        originals: The earlier weights; if there are none, stand-ins take the place of all that is not finite.
    """

    def __init__(self, runner: Runner, originals: list[Original]) -> None:
        self.steps = {original.step for original in originals}  # of which the earlier weights are
        self._rewound = Rewound(originals)
        buffers = [buffer for module in runner.modules for buffer in module.buffers()]
        try:
            self._stand_ins = StandIns([*runner.parameters, *runner.loose_leaves, *buffers])
        except BaseException:
            self._rewound.put_back()
            raise

    @property
    def invented(self) -> int:
        """The number of tensors that have stand-ins."""
        return len(self._stand_ins)

    @property
    def are_real(self) -> bool:
        """Whether all weights are those of an earlier step."""
        return bool(self.steps) and not self.invented

    def put_back(self) -> None:
        self._stand_ins.put_back()
        self._rewound.put_back()


class Rewound:
    """Weights of an earlier step in place of the present ones, until those are put back. Nothing is copied."""

    def __init__(self, originals: list[Original]) -> None:
        self._swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
        for original in originals:
            self._swapped.append((original.tensor, original.tensor.data))
            original.tensor.data = original.value

    def put_back(self) -> None:
        for tensor, present in self._swapped:
            tensor.data = present
        self._swapped = []


class StandIns:
    """Finite values in place of bad weights, until they are put back.

    The versions are put back too. The user's graph may have saved the weights, and its backward may be still to come.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._kept = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors if not is_finite(tensor)]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor, _, value in self._kept:
                # What is finite stays: of an embedding, say, often only a few rows are lost.
                tensor.copy_(torch.where(torch.isfinite(value), value, _plausible(tensor, generator)))

    def __len__(self) -> int:
        return len(self._kept)

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, version, value in self._kept:
                tensor.copy_(value)
                set_version(tensor, version)
        self._kept = []


def _plausible(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values that a layer might begin with: noise as wide as its fan-in allows, ones for a scale."""
    if tensor.dim() < 2:
        return torch.ones_like(tensor)
    fan_in = max(1, tensor.numel() // tensor.shape[0])
    noise: torch.Tensor = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
    return noise.to(device=tensor.device, dtype=tensor.dtype)


def leaf_name(
    tensor: torch.Tensor, runner: Runner | None, batch: Iterable[torch.Tensor], variables: Mapping[str, Any]
) -> tuple[str, str]:
    """The kind of a leaf (`parameter`, `buffer`, `batch`, `tensor`) and its name, the latter empty if it has none."""
    storage = storage_of(tensor)
    if runner is not None:
        for module in runner.modules:
            for name, value in module.named_parameters():
                if storage_of(value) == storage:
                    return "parameter", name
            for name, buffer in module.named_buffers():
                if storage_of(buffer) == storage:
                    return "buffer", name
        if any(storage_of(value) == storage for value in [*runner.parameters, *runner.loose_leaves]):
            return "parameter", _variable(storage, variables)
    if any(storage_of(value) == storage for value in batch):
        return "batch", _variable(storage, variables)
    return "tensor", _variable(storage, variables)


def _variable(storage: int | None, variables: Mapping[str, Any]) -> str:
    return next(
        (name for name, value in variables.items() if isinstance(value, torch.Tensor) and storage_of(value) == storage),
        "",
    )
