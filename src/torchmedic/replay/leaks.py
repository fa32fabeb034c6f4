"""A holder that grows, with the source that fills and empties it, and the memory that is left for it."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchmedic.detect.growth import Growth
from torchmedic.observe.frames import is_user_file
from torchmedic.observe.holders import Walk
from torchmedic.observe.host import host_memory
from torchmedic.observe.leaks import Look
from torchmedic.observe.loop_events import Place
from torchmedic.observe.user_variables import user_files
from torchmedic.observe.weighing import tensors_of
from torchmedic.records import Location, Role
from torchmedic.replay.frames import node_location, place, syntax_tree
from torchmedic.replay.graph import is_freed
from torchmedic.replay.graph import walk as nodes_of
from torchmedic.replay.keys import counts
from torchmedic.replay.putters import traffic
from torchmedic.replay.sites import Site, Traffic
from torchmedic.settings import CGROUP_VARIABLE

_NOTABLE = 64 << 20  # bytes of growth that are no noise
_MEASURED = 4 << 20  # of resident memory, below which it says nothing
_SHARE = 0.02  # of what there is
_NODES = 20_000  # of a graph that are counted
_ASKED = 40  # of which are asked whether they are freed
_PASSES = 3  # over the data, after which a cache has all of it
_TWICE = 2
_AHEAD = 1000  # times as many periods as were seen: an end that is farther away does not matter


class LeakEvidence:
    """What a rule about growth looks at."""

    def __init__(self, growth: Growth, looks: list[Look], frame: FrameType, agent: Any) -> None:
        self.growth = growth
        self.rank: int = agent.rank
        # In which DataLoader worker it grows, and of how many that do the same.
        self.worker: tuple[int, int] | None = (agent.worker, agent.workers) if hasattr(agent, "workers") else None
        self._looks = looks
        self._frames = list(_user_frames(frame))

    @property
    def step(self) -> int:
        return self.growth.last.step

    @functools.cached_property
    def _files(self) -> list[str]:
        return list(dict.fromkeys([*user_files(), *(frame.f_code.co_filename for frame in self._frames)]))

    @functools.cached_property
    def traffic(self) -> Traffic:
        return traffic(self.growth.held, self._files)

    @functools.cached_property
    def put(self) -> Site | None:
        """The line that fills it."""
        return next(iter(self.traffic.puts), None)

    def at_put(self, role: Role, label: str) -> Location | None:
        """The line that fills it; where the source does not show that, the line that training is at."""
        if self.put is not None:
            return node_location(role, self.put.file, self.put.node, label)
        frame = self._frames[0] if self._frames else None
        return place(role, frame.f_code.co_filename, frame.f_lineno, "training is here") if frame is not None else None

    def at_call(self, role: Role, where: Place, method: str, label: str) -> Location:
        """The call of a method on a line, or the whole line."""
        tree = syntax_tree(where.file)
        calls = [
            node
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Call)
            and node.lineno <= where.line <= (node.end_lineno or node.lineno)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == method
        ]
        if len(calls) == 1:
            return node_location(role, where.file, calls[0], label)
        return place(role, where.file, where.line, label)

    @functools.cached_property
    def is_emptied(self) -> bool:
        """Whether the source shows that it is emptied or made anew, even if nobody has seen that yet."""
        traffic = self.traffic
        return bool(traffic.takes) or traffic.is_limited or self._is_of_repeated_call() or self._has_passing_owner()

    @functools.cached_property
    def may_fill_up(self) -> bool:
        """Whether it is filled by key, and may soon have all the keys that there are."""
        if self.put is None or counts(self.growth.held, self.put, self._files) or self.is_critical:
            return False
        return self.grew_over_passes() < _TWICE if self.has_passes else not self.is_notable

    def _is_of_repeated_call(self) -> bool:
        """A variable of a function that is called in a loop lives no longer than one of its calls."""
        held = self.growth.held
        if not held.local:
            return False
        inside = [
            number
            for number, frame in enumerate(self._frames)
            if frame.f_code.co_firstlineno == held.local and frame.f_code.co_filename == held.file
        ]
        return bool(inside) and any(_is_in_loop(frame) for frame in self._frames[inside[0] + 1 :])

    def _has_passing_owner(self) -> bool:
        """Whether the object that it is an attribute of is made anew."""
        held = self.growth.held
        owners = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[.*?\]", "", held.name))[:-1]
        for number, owner in enumerate(owners):
            if owner in ("self", "cls"):
                continue
            name = ".".join(owners[: number + 1])
            local = held.local if number == 0 else 0
            plain = held._replace(name=name, last=owner, local=local, via="", inner="", own="")
            found = traffic(plain, self._files)
            if any(site.value is not None for site in found.takes):
                return True
        return False

    @functools.cached_property
    def graph(self) -> tuple[int, bool]:
        """How many nodes the graph of one item has, or that of all steps, and whether a backward has freed it."""
        walk = Walk(self._looks[-2].sequence if len(self._looks) > 1 else 0, {}, lambda _: None, self.growth.key)
        walk.run(self._frames[0] if self._frames else None)
        value, walk.value = walk.value, None
        if value is None:
            return 0, False
        items = value if isinstance(value, torch.Tensor) else list(tensors_of(value))
        roots = [items] if isinstance(items, torch.Tensor) else items
        node = next((root.grad_fn for root in roots if root.grad_fn is not None), None)
        if node is None:
            return 0, False
        nodes = list(itertools.islice(nodes_of([node]), _NODES))
        return len(nodes), any(is_freed(each) for each in nodes[:_ASKED])

    # Bytes

    @functools.cached_property
    def on_device(self) -> bool:
        growth = self.growth
        return growth.on_device or (
            self._rise("device") > _MEASURED and self._rise("device") > self._rise("rss") and growth.what != "data"
        )

    def _rise(self, name: str) -> int:
        return int(getattr(self.growth.last, name) - getattr(self.growth.first, name))

    @functools.cached_property
    def measured(self) -> int:
        """Bytes by which the process has grown meanwhile, as the system or torch's allocator counts them."""
        rise = self._rise("device" if self.on_device else "rss")
        return rise if rise > _MEASURED else 0

    @functools.cached_property
    def _trust(self) -> float:
        """How much of what the items seem to hold was seen to come: parts that are shared or mapped take no memory."""
        estimated = self.growth.bytes_per_period * self.growth.periods
        return min(1.0, self.measured / estimated) if estimated > _MEASURED else 1.0

    @property
    def bytes_held(self) -> int:
        return int(self.growth.bytes_held * self._trust)

    @property
    def bytes_per_period(self) -> int:
        return int(self.growth.bytes_per_period * self._trust)

    @functools.cached_property
    def rate(self) -> float:
        """Bytes per step, or per period: of data that which it holds, of graphs all that was measured."""
        if self.growth.what == "data" or not self.measured:
            return self.bytes_per_period
        return self.measured / max(1, self.growth.periods)

    @functools.cached_property
    def total(self) -> int:
        """Bytes that there are in all: of the device, or of the host as far as this process may have them."""
        if self.on_device:
            if not torch.cuda.is_initialized():
                return 0  # a device that does not say
            return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        memory = host_memory(cgroups=Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup")))
        return min(each for each in (memory.total, memory.cgroup_limit, memory.address_limit, 1 << 60) if each)

    @functools.cached_property
    def left(self) -> int:
        """Bytes that are still to be had; where several workers grow alike, by one of them."""
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
        return periods if periods <= _AHEAD * self.growth.periods else None

    @property
    def matters(self) -> bool:
        """Whether the memory behind it is much by now, and ends some time."""
        left = self.periods_left
        held = max(self.bytes_held, self.measured if self.growth.what != "data" else 0)
        return held >= _NOTABLE and left is not None

    @property
    def is_critical(self) -> bool:
        """Whether it has taken a good part of all memory."""
        return self.matters and max(self.bytes_held, self.measured) >= 0.25 * (self.left + self.measured)

    @property
    def is_notable(self) -> bool:
        """For what is emptied some time: whether it takes much until then."""
        return self.measured >= max(_NOTABLE, _SHARE * self.total)

    @property
    def is_cache(self) -> bool:
        """Whether it may stop growing when it has everything once. A worker sees only a part of the data in a pass."""
        guarded = self.growth.held.via == "cache" or (self.put is not None and self.put.is_guarded)
        return guarded and (self.worker is not None or self.grew_over_passes() < _PASSES)

    def grew_over_passes(self) -> int:
        """Through how many passes over its data set it has gone on growing; 0 where that is not known."""
        first, last = self.growth.first.marks, self.growth.last.marks
        return max((last[mark] - first.get(mark, 0) for mark in last if mark.startswith("pass ")), default=0)

    @property
    def has_passes(self) -> bool:
        return any(mark.startswith("pass ") for mark in self.growth.last.marks)

    def here(self) -> Place | None:
        frame = self._frames[0] if self._frames else None
        return Place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(frame)
            if frame.f_code.co_name == "<module>":
                break  # who has started the script is no part of it
        frame = frame.f_back
    return found


def _is_in_loop(frame: FrameType) -> bool:
    """Whether the line that a frame is at stands in a loop."""
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    line = frame.f_lineno
    return any(
        isinstance(node, ast.For | ast.AsyncFor | ast.While)
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        and node.lineno >= frame.f_code.co_firstlineno
        for node in (ast.walk(tree) if tree is not None else ())
    )
