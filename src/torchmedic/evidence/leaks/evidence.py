"""A holder that grows, with the source that fills and empties it: whether that has an end, and which line it is."""

from __future__ import annotations

import ast
import functools
import re

from torchmedic.evidence.leaks.grown_memory import GrownMemory
from torchmedic.evidence.leaks.keys import counts, is_bounded, is_by_identity, never_returns
from torchmedic.evidence.leaks.length_limits import LengthLimit
from torchmedic.evidence.leaks.lifetimes import Lifetime, is_last_line
from torchmedic.evidence.leaks.loop_turns import may_be_given_up
from torchmedic.evidence.leaks.readers import is_only_sampled, is_read
from torchmedic.evidence.leaks.shared_defaults import is_default
from torchmedic.evidence.leaks.source.sites import Site, Traffic
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.leaks.source.training_loops import training_loops
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, place, syntax_tree
from torchmedic.source.spots import Place
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import user_files

_PASSES = 3  # over the data, after which a cache has all of it
_TWICE = 2
_LEAST = 64  # bytes of any item
_EACH = 0.9  # items per step
_BEYOND = 1.2  # times the memory that is left
_MANY = 128  # steps, or
_MUCH = 256 << 20  # bytes, that nobody gives up at the end of an epoch without a line that says so


class LeakEvidence(GrownMemory):
    """What a rule about growth looks at."""

    @property
    def step_number(self) -> int:
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
            for node in nodes_in(tree)
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
        traffic, far = self.traffic, self.far_limit is not None
        takes = [site for site in traffic.takes if not (far and self._limit.governs(site))]
        takes = [site for site in takes if not self._limit.is_off(site)]
        limited = not far and (traffic.is_limited or bool(self.growth.held.most))
        if self.growth.what != "data":
            takes = [site for site in takes if not is_last_line(site, self._frames)]
        return bool(takes) or limited or self._passes

    @property
    def _passes(self) -> bool:
        """Whether it does not live long."""
        held, frames = self.growth.held, self._frames
        if held.kind == "items" and is_default(self.growth.key[0], held.owners, frames):
            return False
        lifetime = Lifetime(held, frames, self._files)
        return lifetime.is_one_call or lifetime.has_passing_owner

    @functools.cached_property
    def may_be_given_up(self) -> bool:
        """Whether it is not yet known that it outlives a turn of the loops around, and it has not taken much so far."""
        growth = self.growth
        if self.is_notable or self.is_critical or growth.period != "step" or self.worker is not None:
            return False
        many = self.bytes_held >= _MUCH if growth.what == "data" else growth.periods >= _MANY
        return not many and may_be_given_up(growth, self._frames)

    @functools.cached_property
    def _limit(self) -> LengthLimit:
        return LengthLimit(self.growth.held, self.traffic, self._frames)

    @functools.cached_property
    def far_limit(self) -> tuple[int, int] | None:
        """The number of items that it may have, and their bytes, where memory ends long before there are so many."""
        limit, growth = self._limit.most(), self.growth
        if limit is None or limit <= growth.held.size or not growth.held.size or growth.held.kind != "items":
            return None
        grown = growth.rate * max(1, growth.periods)
        held = self.bytes_held / growth.held.size
        each = max(held, self.measured / grown if growth.what != "data" and grown else held, _LEAST)
        return (
            (limit, int(limit * each)) if self.left and limit * each > _BEYOND * (self.left + self.bytes_held) else None
        )

    @functools.cached_property
    def may_fill_up(self) -> bool:
        """Whether it is filled by key, and may soon have all the keys that there are."""
        if self.put is None or self.far_limit is not None or self.is_critical:
            return False
        if is_bounded(self.put):
            return True
        if counts(self.growth.held, self.put, self._files):
            return False
        if self.growth.what == "graphs" and is_by_identity(self.put):
            return False
        return self.grew_over_passes() < _TWICE if self.has_passes else not self.is_notable

    @property
    def is_cache(self) -> bool:
        """Whether it may stop growing when it has everything once."""
        held, put = self.growth.held, self.put
        if put is None or not (held.via == "cache" or put.is_guarded):
            return False
        if never_returns(held, put, self._files):
            return False
        # Of what is left, one of several workers sees an ever smaller part in each pass: such growth is not steady.
        passes = max(_PASSES, _TWICE * self.worker[1]) if self.worker is not None else _PASSES
        return self.grew_over_passes() < passes

    def grew_over_passes(self) -> int:
        """Through how many passes over its data set it has gone on growing; 0 where that is not known."""
        first, last = self.growth.first.marks, self.growth.last.marks
        return max((last[mark] - first.get(mark, 0) for mark in last if mark.startswith("pass ")), default=0)

    @property
    def has_passes(self) -> bool:
        return any(mark.startswith("pass ") for mark in self.growth.last.marks)

    @functools.cached_property
    def may_be_whole_soon(self) -> bool:
        """Whether the data has not been passed over twice, and what is kept of it may be wanted as a whole."""
        reads_data = any(mark.startswith(("pass ", "stream ")) for mark in self.growth.last.marks)
        reads_data = reads_data or (self.put is not None and self.put.gives_data)
        if not reads_data or self.grew_over_passes() >= _TWICE or self.is_critical:
            return False
        return bool(self.growth.held.via) or is_read(self.growth.held, self.traffic, self._files)

    @functools.cached_property
    def is_trained_on(self) -> bool:
        """Whether it is filled between trainings, which then use all of it: samples that get labels, games, stages."""
        if self.put is None or self.is_critical or self.growth.held.via == "cache":
            return False  # a cached function is filled wherever it is called
        if self._is_queue and self.put.loops and all(isinstance(loop, ast.While) for loop in self.put.loops):
            return False  # somebody runs ahead of who takes one after the other, without end
        growth = self.growth
        each_step = growth.period == "step" and growth.held.kind == "items" and growth.rate >= _EACH
        if each_step and is_only_sampled(growth.held, self.traffic, self._files):
            return False  # it comes with the steps, and none of them uses all of it: a replay buffer
        return training_loops(self._files).read_what_others_fill(self.growth.held, self.put)

    @property
    def _is_queue(self) -> bool:
        held = self.growth.held
        return held.name.endswith((".queue", "._queue")) and not held.name.endswith(f".{held.last}")

    @property
    def is_of_library(self) -> bool:
        """Whether it belongs to an object of a library, and no line of the user's own fills it."""
        held = self.growth.held
        whole = re.sub(r"\[.*?\]", "", held.name)
        return self.put is None and "." in whole and not whole.endswith(f".{held.last}")

    @property
    def goes_backward(self) -> bool:
        """Whether a loss is made from what it holds, so that this cannot do without its graph."""
        return training_loops(self._files).goes_backward(self.growth.held.last)

    def here(self) -> Place | None:
        frame = self._frames[0] if self._frames else None
        return Place(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
