"""Whether a step may run out of memory, so that the guard has to be up.

A step that is small beside the free memory cannot, however full memory is. Such steps are also the short ones, of whose
time the guard would take a share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from torchmedic.contained import contained
from torchmedic.observe.memory.host import host_memory
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.optimizer_memory import OptimizerMemory
from torchmedic.recovery.room import UPDATE_TEMPORARIES, fraction_of
from torchmedic.recovery.saved_tensors import SavedTensors
from torchmedic.source.objects.graph import walk

_MIN_USED_SHARE = 0.5  # of some memory; below it, one step would have to need twice as much as all before
_GROWTH = 8  # a later step may be so many times as large as the largest graph so far: longer texts, a validation


class Need:
    """What the steps of this process need, as far as it is known."""

    def __init__(self, saved: SavedTensors, optimizers: OptimizerMemory) -> None:
        self._saved = saved
        self._optimizers = optimizers
        self._most: int | None = None  # bytes that a graph has saved
        self.is_measuring = False  # the graph of the next backward pass is to be measured

    def may_not_fit(self) -> bool:
        """Whether half of some memory is in use, and a larger step may not fit in the rest."""
        self.is_measuring = _may_run_out(0)
        if self._most is None or not self.is_measuring:
            return self.is_measuring
        weights = sum(each.nbytes for each in self._optimizers.parameters)
        return _may_run_out(_GROWTH * self._most + (1 + UPDATE_TEMPORARIES) * weights)

    @contained("recover.measure")
    def measure(self, roots: Iterable[torch.Tensor]) -> None:
        """Note how much a graph has saved."""
        self.is_measuring = False
        with unseen():
            found = {key: nbytes for _, key, nbytes, _ in self._saved.storages(walk(each.grad_fn for each in roots))}
        self._most = max(self._most or 0, sum(found.values()))


def _may_run_out(needed: int) -> bool:
    """Whether half of some memory or limit is in use, and so many bytes do not fit in the rest; 0 if not known."""
    found = list(_used_and_allowed())
    return not found or any(
        used >= _MIN_USED_SHARE * allowed and (not needed or used + needed > allowed) for used, allowed in found
    )


def _used_and_allowed() -> Iterator[tuple[int, int]]:
    """The bytes in use and those that are allowed, for each memory and limit."""
    memory = host_memory()
    available = memory.available + memory.resident if memory.available and memory.resident else None
    for used, allowed in (
        (memory.resident, available),
        (memory.resident, memory.cgroup_limit),
        (memory.address_space, memory.address_limit),
        (memory.data, memory.data_limit),
    ):
        if used and allowed:
            yield used, allowed
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            for device in range(torch.cuda.device_count()):
                if reserved := torch.cuda.memory_reserved(device):
                    free, total = torch.cuda.mem_get_info(device)
                    yield total - free, total
                    yield reserved, int(fraction_of(device) * total)
