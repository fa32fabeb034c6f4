"""What the user's loop does, event by event, while it is young: the ledger behind all rules about silent mistakes.

Everything is noted for the first steps, which is enough for accumulation cycles and the end of a short epoch, and again
for some steps after a change: another optimizer, the first validation, a model that changes its mode. In between the
ledger sleeps and costs one comparison a step. It holds numbers, places and weak references, never the user's tensors,
and reads no value of a device that would have to be waited for.

Whether gradients were cleared is not told by who was called but by a *witness*: two parameters of each optimizer, whose
`.grad` is looked at before and after every event. So `p.grad = None` by hand is seen as well as `zero_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchmedic.contained import contained
from torchmedic.observe.device.device_waits import Waited
from torchmedic.observe.loop.evaluation import Evaluation
from torchmedic.observe.loop.events import Event, Watched
from torchmedic.observe.loop.graph_growth import GraphGrowth
from torchmedic.observe.loop.hand_updates import HandUpdates
from torchmedic.observe.loop.loads import OwnState, Unmatched
from torchmedic.observe.loop.numbering import Numbering, Sites
from torchmedic.observe.loop.pair_tables import PairTable
from torchmedic.observe.loop.passes import Passes
from torchmedic.observe.loop.reach import Reach
from torchmedic.observe.loop.set_backs import SetBacks
from torchmedic.observe.loop.standstill import Standstill
from torchmedic.observe.loop.teachers import Teachers
from torchmedic.observe.loop.thaws import Thaws
from torchmedic.source.spots import NOWHERE, Place

_FIRST_STEPS = 64  # that are noted when training begins
STEPS_AFTER_CHANGE = 24  # that are noted
_MAX_CHANGES = 4  # that are looked at
_MAX_ANEW = 2  # times that the ledger wakes because gradients are gone
_MAX_EVENTS = 4000  # that are kept
_MAX_IDLE = 64  # batches and forward passes in a row, as of a validation, that are noted


class Habits(Numbering):
    """The ledger. `EventWriter` writes into it; `look` is called when there is enough of it to be judged."""

    def __init__(self, look: Callable[[Habits], None], prepare: Callable[[], object]) -> None:
        super().__init__()
        self._look = look
        self._prepare = prepare  # to look: done before training begins, as it takes some milliseconds
        self.listening = False  # until it is switched on
        self.awake = False
        self.on_wake: Callable[[], None] | None = None
        self.mode: tuple[bool, bool] | None = None  # of the last root module: training, gradients
        self.events: list[Event] = []
        self.optimizers: dict[int, Watched] = {}
        self.metrics: dict[int, list[float]] = {}  # by the number of a schedule: what it was given to compare
        self.epochs_of_schedules: dict[int, int] = {}  # by number: the epoch in which it was judged first
        self.held: dict[int, Any] = {}  # by the identity of an optimizer: what is judged at the end of the run
        self.reach = Reach()
        self.growth = GraphGrowth()
        self.by_hand = HandUpdates()
        self.evaluation = Evaluation()
        self.thaws = Thaws()
        self.standstill = Standstill(self.judge, self._look_anew, self._look_at_frozen)
        self.waited: list[Waited] = []  # lines that wait for the device in every step
        self.steps = 0  # of any optimizer
        self.empty: tuple[Place, int, int] | None = None  # a loader without a batch: its loop, items, size of a batch
        self.is_ending = False
        self.unmatched: list[Unmatched] = []  # states that were loaded in vain
        self.set_backs = SetBacks()
        self.teachers = Teachers()
        self.passes = Passes()
        self.pair_tables: list[tuple[PairTable | None, Place]] = []  # of a few losses, and who called backward
        self.own_states: list[OwnState] = []  # that were loaded after an update
        self.wants_norms = False  # also where they must be waited for: something is suspected
        self._woke = 0
        self._last = _FIRST_STEPS
        self._wakes = self._anew = 0
        self._backwards = 0
        self._where = Sites().where
        self._idle = 0  # batches and forward passes since anything else happened

    def start(self) -> None:
        self.listening = self.awake = self.passes.on = True
        self.standstill.start()

    def stop(self) -> None:
        """Stop for good."""
        self.listening = self.awake = self.passes.on = False
        self.evaluation.refuse()
        self.standstill.stop()
        self.events.clear()

    def reset(self) -> None:
        """Forget the loop of the parent, in a forked child."""
        self.events.clear()
        self.steps = self._woke = 0

    def wake(self) -> None:
        """Something has changed: note the next steps."""
        if not self.listening or self.awake or self._wakes >= _MAX_CHANGES:
            return
        self._wakes += 1
        self.listening = self._wakes < _MAX_CHANGES
        self._begin()

    def _begin(self) -> None:
        self.awake = True
        self._woke, self._last = self.steps, STEPS_AFTER_CHANGE
        self._backwards = 0
        self._add("gap", 0, None)
        if self.on_wake is not None:
            self.on_wake()

    def _look_anew(self) -> None:
        """Note the next steps, and which parameters the loss reaches now."""
        if self._anew < _MAX_ANEW:
            self._anew += 1
            self.reach = Reach(since=self.steps)
            self._begin()

    @property
    def models(self) -> list[torch.nn.Module]:
        """The modules that the loop calls."""
        numbers = dict.fromkeys(event.who for event in self.events if event.kind == "forward")
        return [module for number in numbers if isinstance(module := self.thing(number), torch.nn.Module)]

    @property
    def owned(self) -> set[int]:
        """Identities of the parameters that optimizers have."""
        return {id(tensor) for watched in self.optimizers.values() for tensor in watched.parameters}

    def _look_at_frozen(self, step: int) -> None:
        if self.thaws.look((tensor for model in self.models for tensor in model.parameters()), self.owned, step):
            self.judge()

    def _sleep(self) -> None:
        self.judge()
        self.awake = False

    @contained("observe.habits")
    def judge(self) -> None:
        self.evaluation.disarm()
        if self.events or self.empty is not None:
            self._look(self)

    def ending(self) -> None:
        """The run ends: judge what there is."""
        self.is_ending = True
        self.judge()

    def waits_measured(self, found: list[Waited]) -> None:
        self.waited += found
        self.judge()

    def lost_ratio(self, number: int) -> tuple[float, float] | None:
        """Norms of the gradients that an update used, and of all that there were before some were cleared."""
        watched = self.optimizers.get(number)
        return watched.thrown_away.norms() if watched is not None else None

    def _add(self, kind: str, who: int, frame: FrameType | None, fact: Any = None) -> None:
        if self.evaluation.is_open:
            self.evaluation.disarm()
        if kind not in ("forward", "fetch"):
            self._idle = 0
        elif self._idle >= _MAX_IDLE:
            return
        else:
            self._idle += 1
        site, place = self._where(frame) if frame is not None else (0, NOWHERE)
        states = {
            watched.number: watched.witness.look()
            for watched in self.optimizers.values()
            if watched.witness is not None
        }
        self.events.append(Event(kind, who, site, place, states, self.steps, fact))
        for watched in self.optimizers.values():
            if not watched.overwrites.is_over:
                watched.overwrites.event(place, is_forward=kind == "forward")
        if len(self.events) >= _MAX_EVENTS:
            self.listening = False
            self._sleep()
