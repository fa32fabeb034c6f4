"""Looks at the holders of memory now and then, to find those that only ever grow while they grow.

A look takes some milliseconds, so there are few: more and more steps lie between them, and all together may take a
thousandth of the time. What a look leaves behind are numbers, names and weak references.
`detect/trends/heap_growth.py` judges.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable
from time import perf_counter, thread_time
from types import FrameType
from typing import Any, NamedTuple

from torch._C._autograd import _get_sequence_nr

from torchmedic.contained import contained
from torchmedic.observe.budget import Account
from torchmedic.observe.heap.unnamed_objects import GradientCycles, unnamed_objects
from torchmedic.observe.heap.walk import Found, Held, Walk
from torchmedic.observe.heap.weighing import Weight, weigh
from torchmedic.observe.memory.usage import device_bytes, resident_bytes

_NEVER = 1 << 62
_FIRST_STEPS = 8  # before the first look, and between the looks of a suspicion
_MAX_OVERDRAWN_SECONDS = 0.4  # of the account for looks, where something grows
_MAX_LOOKS = 64  # that are kept
_MAX_TOLD = 5  # holders
_MAX_DATA_SETS = 32
_RECENT_LOOKS = 10
_MIN_RISES = 2  # looks of these that have seen more than the look before
_UNEXPLAINED_BYTES = 32 << 20  # of growth that no holder explains
_MAX_SEARCHES = 4  # for its holders
_LOOKS_IN_A_ROW = 4  # after which it is known whether something grows
_MAX_MARKED_LOOKS = 24  # at the begin of a pass over data, a validation, a trial

Key = tuple[int, str]


class Look(NamedTuple):
    """One look: when it was, and what the process held in all."""

    step: int
    batch: int  # calls of a root module so far
    sequence: int
    time: float
    rss: int
    device: int
    marks: dict[str, int]  # how often each longer period has begun: passes over a data set, validations, trials


class Point(NamedTuple):
    look: Look
    held: Held
    weight: Weight | None


class LeakWatch:
    """Follows the holders from look to look. Fed by the hooks; `ask` is called when something may be leaking."""

    def __init__(
        self,
        ask: Callable[[LeakWatch, FrameType], None],
        tell: Callable[[list[tuple[Held, int]]], None],
        steps: Callable[[], int],
        account: Account,
        most: int | None = None,
    ) -> None:
        self._account = account
        self._most = most  # objects of one walk, which then leaves the variables of functions alone
        self._ask = ask
        self._tell = tell
        self._steps = steps
        self.cycles = GradientCycles()
        self._data_sets: dict[int, weakref.ref[Any]] = {}
        self._pressed = False  # memory is short: who holds it is to be told
        self._due_batch = _FIRST_STEPS
        self.on = False
        self.tracks: dict[Key, list[Point]] = {}
        self.looks: list[Look] = []
        self.suspicious = False
        self.due = _NEVER  # the step at which to look again; read by the hooks, so that other steps cost nothing
        self._batch = 0
        self._marks: dict[str, int] = {}
        self._training: bool | None = None
        self._seen_marks = 0
        self._asked: dict[Key, int] = {}  # how big what was when the rules were asked
        self._unexplained = 0  # bytes of the process at which to look for holders that have no name
        self._searches = 0
        self._iterators: list[weakref.ref[Any]] = []
        self._soon = 0  # looks that are to follow each other soon

    def start(self) -> None:
        self.on = True
        self.due = _FIRST_STEPS

    def stop(self) -> None:
        """Stop for good."""
        self.on = False
        self.due = _NEVER
        self.tracks.clear()

    def wants_to_know(self, growth: Any) -> bool:
        """Whether to ask the rules about a growth: for the first time, or because it has grown much since."""
        size = growth.last.step if growth.held.kind == "age" else growth.held.size
        if size < (1.1 if growth.what == "data" else 1.5) * self._asked.get(growth.key, 0):
            return False
        self._asked[growth.key] = size
        return True

    # What the hooks tell

    def stepped(self, step: int, frame: FrameType) -> None:
        """A step has ended at which a look is due."""
        if self._may_look():
            self.look(frame)
        self._soon = max(0, self._soon - 1)
        self.due = step + (_FIRST_STEPS if self.suspicious or self._soon else max(_FIRST_STEPS, step // 2))

    def called(self, *, training: bool) -> None:
        """A root module is called."""
        self._batch += 1
        if self._pressed and self.on:
            self.look(sys._getframe(1))
        elif self._batch >= self._due_batch and self.on:
            self._due_batch = self._batch + max(_FIRST_STEPS, self._batch // 2)
            if self._steps() == 0 and self._may_look():
                self.look(sys._getframe(1))  # nothing is trained here
        if training is not self._training:
            if training and self._training is False:
                self.mark("validation", sys._getframe(1))
            self._training = training

    def loading(self, iterator: Any, frame: FrameType) -> None:
        """A pass over a data set begins."""
        data = getattr(iterator, "_dataset", None)
        if len(self._data_sets) >= _MAX_DATA_SETS and id(data) not in self._data_sets:
            return  # each is a new one: no period to speak of
        self.watch_data(data)
        ends = hasattr(data, "__len__") or f"stream {id(data)}" in self._marks
        self.mark(f"{'pass' if ends else 'stream'} {id(data)}", frame)  # whether a stream ends is seen when it has

    def watch_data(self, data: Any) -> None:
        with contextlib.suppress(TypeError):
            self._data_sets[id(data)] = weakref.ref(data)

    def data_sets(self) -> list[Any]:
        """The data sets that are being read, and iterators. Often only their loader, or a loop, holds them."""
        references = (*self._data_sets.values(), *self._iterators)
        return [data for reference in references if (data := reference()) is not None]

    def mark(self, period: str, frame: FrameType) -> None:
        """A period begins that comes back many times."""
        if not self.on:
            return
        self._marks[period] = self._marks.get(period, 0) + 1
        if self._marks[period] > 1 and self._seen_marks < _MAX_MARKED_LOOKS and self._may_look():
            self._seen_marks += 1
            self.look(frame)

    def press(self) -> None:
        """Memory gets short: look at the next occasion, and report the biggest holders."""
        if self.on:
            self._pressed = True
            self.due = 0

    def _may_look(self) -> bool:
        if not self.on:
            return False
        return self._pressed or self._account.left >= (-_MAX_OVERDRAWN_SECONDS if self.suspicious else 0.0)

    # A look

    @contained("observe.leaks")
    def look(self, frame: FrameType) -> None:
        began = thread_time()  # no time that others took from us
        before = self.looks[-1] if self.looks else None
        sizes = {key: points[-1].held.size for key, points in self.tracks.items()}
        sizes |= {(0, points[-1].held.name): points[-1].held.size for points in self.tracks.values()}
        pressed, self._pressed = self._pressed, False
        self._find_iterators()
        walk = Walk(before.sequence if before is not None else 0, sizes, weigh, weigh_all=pressed)
        found = walk.run(frame if self._most is None else None, self.data_sets(), self._most)
        look = Look(
            *(self._steps(), self._batch, _get_sequence_nr(), perf_counter(), resident_bytes(), device_bytes()),
            dict(self._marks),
        )
        self._account.spend(thread_time() - began)
        if self.cycles.wanted and look.step > (before.step if before is not None else 0):
            count, place = self.cycles.count(), self.cycles.place  # these have a limit of their own
            found.holders[0, "cycles"] = Held("", "", "cycles", count, place.file, place.line)
        self._keep(look, found)
        if self.suspicious:
            self._ask(self, frame)
        if pressed:
            self._tell(_biggest(found))

    def _find_iterators(self) -> None:
        """Search for iterators where memory grows and no known holder explains it."""
        held = max(resident_bytes(), device_bytes())
        is_first = self._steps() > 0 and self.looks[-1:] != [] and self.looks[-1].step == 0
        if not self._unexplained or is_first:  # what the first steps need stays
            self._unexplained = held + _UNEXPLAINED_BYTES
        elif (  # a worker would get a copy of every page
            held > self._unexplained and not self.suspicious and self._searches < _MAX_SEARCHES and self._most is None
        ):
            self._searches += 1
            self._unexplained = held + (_UNEXPLAINED_BYTES << self._searches)
            self._iterators = [weakref.ref(each) for each in unnamed_objects()]
            self._soon = _LOOKS_IN_A_ROW if self._iterators else 0

    def _keep(self, look: Look, found: Found) -> None:
        self.looks = [*self.looks[-_MAX_LOOKS + 1 :], look]
        gone: dict[tuple[str, str, int], list[Point]] = {}
        for key in [key for key in self.tracks if key not in found.holders and found.whole and key != (0, "cycles")]:
            points = self.tracks.pop(key)
            held = points[-1].held
            gone[held.name, held.file, held.local] = points
        for key, held in found.holders.items():
            points = self.tracks.setdefault(key, [])
            weight = found.weights.get(key)
            if not points and weight is not None:
                before = gone.get((held.name, held.file, held.local), [])
                if _is_same(before, weight):  # `losses = losses + [loss]`
                    points += before
            known = next((point.weight for point in reversed(points) if point.weight is not None), None)
            if points and (
                (held.kind != "age" and held.size < points[-1].held.size)
                or (weight is not None and known is not None and not weight.may_follow(known))
            ):
                points.clear()  # it was emptied
            points.append(Point(look, held, weight))
            del points[:-_MAX_LOOKS]
        self.suspicious = any(_grows(points) for points in self.tracks.values())


def _is_same(points: list[Point], weight: Weight) -> bool:
    """Whether a container has the first item of one that is gone."""
    known = next((point.weight for point in reversed(points) if point.weight is not None), None)
    return known is not None and weight.has_witness(known)


def _biggest(found: Found) -> list[tuple[Held, int]]:
    """The biggest holders, with their bytes."""
    weights = ((found.holders[key], weight) for key, weight in found.weights.items() if weight is not None)
    held = [(each, int(each.size * (weight.host + weight.device))) for each, weight in weights]
    held += [(each, each.size) for each in found.holders.values() if each.kind == "bytes"]
    biggest = {each.last: (each, nbytes) for each, nbytes in sorted(held, key=lambda entry: entry[1])}
    return sorted(biggest.values(), key=lambda entry: -entry[1])[:_MAX_TOLD]


def _grows(points: list[Point]) -> bool:
    """Whether there is any reason to look closer: there was more at three of the last looks."""
    if len(points) < 3 or points[-1].held.bounded:
        return False
    kind = points[-1].held.kind
    if kind == "age":
        return True
    weights = [point.weight for point in points[-_RECENT_LOOKS:] if point.weight is not None][-2:]
    plain = bool(weights) and all(weight.graphs == 0 and weight.host + weight.device < 1024 for weight in weights)
    sizes = [point.held.size for point in points[-_RECENT_LOOKS:]]
    return not plain and sum(after > before for before, after in itertools.pairwise(sizes)) >= _MIN_RISES
