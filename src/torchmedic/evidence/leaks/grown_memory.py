"""The memory behind a holder that grows: what it has by now, what comes with each step, and what is left."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

from torchmedic.detect.trends.heap_growth import Growth
from torchmedic.evidence.memory.accounting.saved_by_graph import tensors_saved_by
from torchmedic.observe.context import ReportingProcess
from torchmedic.observe.heap.growth_watch import Look
from torchmedic.observe.heap.walk import Walk
from torchmedic.observe.heap.weighing import tensors_of
from torchmedic.observe.memory.host import host_memory
from torchmedic.settings import CGROUP_VARIABLE
from torchmedic.source.objects.containers import CONTAINERS
from torchmedic.source.objects.graph import is_freed
from torchmedic.source.objects.graph import walk as nodes_of
from torchmedic.source.syntax import is_module
from torchmedic.source.user_code import is_user_file

_NOTABLE_BYTES = 64 << 20  # bytes of growth that are no noise
_NOTABLE_SHARE = 0.02  # share of all memory
_MIN_MEASURED_BYTES = 4 << 20  # bytes of resident memory, below which a rise says nothing
_CRITICAL_SHARE = 0.25  # share of the memory that was free
_MAX_NODES = 20_000  # nodes of a graph that are counted
_MAX_ASKED_NODES = 40  # nodes of a graph that are asked whether they are freed
_MAX_WEIGHED_NODES = 5000  # nodes of a graph that are asked what they have saved
_NODE_BYTES = 1 << 10  # more than a node takes itself
_MAX_PERIODS_LEFT = 2_000_000  # until memory ends, that are worth a word
_MAX_PERIODS_AHEAD = 1000  # times the periods that were seen: an end that is farther away does not matter


class GrownMemory:
    """The bytes of one growth."""

    def __init__(self, growth: Growth, looks: list[Look], frame: FrameType, agent: ReportingProcess) -> None:
        self.growth = growth
        self.rank: int = agent.rank
        # In which DataLoader worker it grows, and of how many that do the same.
        self.worker = agent.loader_worker
        self._looks = looks
        self._frames = list(_user_frames(frame))

    @functools.cached_property
    def graph(self) -> tuple[int, bool, int]:
        """How many nodes the graph of one item has, or that of all steps, whether a backward has freed it, its bytes.

        The bytes are what it alone keeps for a backward, 0 where that is not known.
        """
        walk = Walk(self._looks[-2].sequence if len(self._looks) > 1 else 0, {}, lambda _: None, self.growth.key)
        walk.run(self._frames[0] if self._frames else None)
        value, walk.value = walk.value, None
        if value is None:
            return 0, False, 0
        items = value if isinstance(value, torch.Tensor) else list(tensors_of(value))
        roots = [items] if isinstance(items, torch.Tensor) else items
        roots = [root for root in roots if root.grad_fn is not None]
        if not roots:
            return 0, False, 0
        nodes = list(itertools.islice(nodes_of([roots[0].grad_fn]), _MAX_NODES))
        nbytes = own_bytes(roots, tensors_of(value, first=True)) if isinstance(value, CONTAINERS) else 0
        nbytes = nbytes if nbytes >= _NODE_BYTES * len(nodes) else 0  # else the nodes themselves take about as much
        return len(nodes), any(is_freed(each) for each in nodes[:_MAX_ASKED_NODES]), nbytes

    @functools.cached_property
    def on_device(self) -> bool:
        growth = self.growth
        return growth.on_device or (
            self._rise("device") > _MIN_MEASURED_BYTES
            and self._rise("device") > self._rise("rss")
            and growth.what != "data"
        )

    def _rise(self, name: str) -> int:
        return int(getattr(self.growth.last, name) - getattr(self.growth.first, name))

    @functools.cached_property
    def measured(self) -> int:
        """Bytes by which the process has grown meanwhile, as the system or torch's allocator counts them."""
        rise = self._rise("device" if self.on_device else "rss")
        return rise if rise > _MIN_MEASURED_BYTES else 0

    @functools.cached_property
    def _trust(self) -> float:
        """How much of what the items seem to hold was seen to come: parts that are shared or mapped take no memory."""
        estimated = self.growth.bytes_per_period * self.growth.periods
        return min(1.0, self.measured / estimated) if estimated > _MIN_MEASURED_BYTES else 1.0

    @property
    def bytes_held(self) -> int:
        return int(self.growth.bytes_held * self._trust)

    @property
    def bytes_per_period(self) -> int:
        return int(self.growth.bytes_per_period * self._trust)

    @functools.cached_property
    def rate(self) -> float:
        """Bytes per step, or per period: of data that which it holds, of graphs all that was measured, or is known."""
        if self.growth.what == "data":
            return self.bytes_per_period
        if not self.measured:
            return self.bytes_per_period + self.growth.rate * self.graph[2]
        return self.measured / max(1, self.growth.periods)

    @functools.cached_property
    def total(self) -> int:
        """All bytes of the device, or those of the host that this process may have."""
        if self.on_device:
            if not torch.cuda.is_initialized():
                return 0  # a device that does not say
            return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        memory = host_memory(cgroups=Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup")))
        return min(each for each in (memory.total, memory.cgroup_limit, memory.address_limit, 1 << 60) if each)

    @functools.cached_property
    def left(self) -> int:
        """Bytes that are still free; if several workers grow alike, the share of one of them."""
        return self._left_for_all // (self.worker[1] if self.worker is not None else 1)

    @functools.cached_property
    def _left_for_all(self) -> int:
        if self.on_device:
            if not torch.cuda.is_initialized():
                return 0
            free, _ = torch.cuda.mem_get_info()
            return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
        memory = host_memory(cgroups=Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup")))
        resident = memory.resident or 0
        lefts = [memory.available]
        if memory.cgroup_limit is not None:
            lefts.append(memory.cgroup_limit - resident)
        if memory.address_limit is not None and memory.address_space is not None:
            lefts.append(memory.address_limit - memory.address_space)
        return max(0, min((each for each in lefts if each is not None), default=0))

    @property
    def periods_left(self) -> int | None:
        """After how many more steps or periods memory ends at this rate."""
        if self.rate < 1 or not self.left:
            return None
        periods = int(self.left / self.rate)
        return periods if periods <= _MAX_PERIODS_LEFT else None

    @property
    def matters(self) -> bool:
        """Whether the growth has taken much memory by now, and will use it up."""
        if max(self.bytes_held, self.measured if self.growth.what != "data" else 0) < _NOTABLE_BYTES:
            return False
        left = self.periods_left
        return left is not None and left <= _MAX_PERIODS_AHEAD * self.growth.periods

    @property
    def is_critical(self) -> bool:
        """Whether the growth has taken a good part of all memory."""
        return self.matters and max(self.bytes_held, self.measured) >= _CRITICAL_SHARE * (self.left + self.measured)

    @property
    def is_notable(self) -> bool:
        """Whether a holder that is emptied at times takes much memory until then."""
        return self.measured >= max(_NOTABLE_BYTES, _NOTABLE_SHARE * self.total)


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
            if is_module(frame.f_code):
                break  # who has started the script is no part of it
        frame = frame.f_back
    return found


def own_bytes(roots: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> int:
    """The bytes that graphs keep for a backward and that other graphs, which keep the weights as well, do not."""
    shared = _saved(others)
    return sum(nbytes for storage, nbytes in _saved(roots).items() if storage not in shared)


def _saved(roots: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes that graphs keep for a backward, by storage."""
    found: dict[int, int] = {}
    for node in itertools.islice(nodes_of(root.grad_fn for root in roots), _MAX_WEIGHED_NODES):
        for tensor in tensors_saved_by(node):
            if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return found
