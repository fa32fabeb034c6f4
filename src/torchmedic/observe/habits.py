"""What the user's loop does, event by event, while it is young: the ledger behind all rules about silent mistakes.

Everything is noted for the first steps, which is enough for accumulation cycles and the end of a short epoch, and again
for some steps after a change: another optimizer, the first validation, a model that changes its mode. In between the
ledger sleeps and costs one comparison a step. It holds numbers, places and weak references, never the user's tensors,
and reads no value of a device that would have to be waited for.

Whether gradients were cleared is not told by who was called but by a *witness*: two parameters of each optimizer, whose
`.grad` is looked at before and after every event. So `p.grad = None` by hand is seen as well as `zero_grad()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import SequentialSampler

from torchmedic.contained import contained
from torchmedic.observe.frames import outside_torch, user_frame
from torchmedic.observe.reach import Reach
from torchmedic.observe.thrown_away import ThrownAway
from torchmedic.observe.witness import State, Witness, witness_of

_FIRST = 64  # steps that are noted when training begins
_AGAIN = 24  # and after a change
_WAKES = 4  # changes that are looked at
_MOST = 4000  # events that are kept
_LOOKS = frozenset({6, 12, 24, 40})  # steps since it woke at which the evidence is looked at
_IDLE = 64  # batches and forward passes in a row, as of a validation, that are noted
_NORMS = 24  # steps in which the witness is also measured, on the CPU


class Place(NamedTuple):
    """A line of the user's."""

    file: str
    line: int


_NOWHERE = Place("", 0)


class Event(NamedTuple):
    """One thing that the loop did.

    `who` is the number of the optimizer, scheduler or module that it was done to. `site` tells calls apart, in the
    user's code or in a library's. `states` holds the witness of every optimizer, by its number.
    """

    kind: str
    who: int
    site: int
    place: Place
    states: dict[int, State]
    step: int
    fact: Any = None


class Watched:
    """An optimizer that was seen to be built or to step."""

    def __init__(self, optimizer: Any, number: int, built: Place | None) -> None:
        self.reference = weakref.ref(optimizer)
        self.number = number
        self.built = built
        self.witness: Witness | None = None
        self.searched = 0
        self.thrown_away = ThrownAway()
        self.used: State | None = None  # the state of the witness when it was last updated

    @property
    def optimizer(self) -> Any:
        return self.reference()

    def find_witness(self) -> None:
        optimizer = self.optimizer
        if optimizer is not None and self.searched <= 16:
            self.searched += 1
            self.witness = witness_of(optimizer)

    def is_used_gradient(self) -> bool:
        """Whether the gradients that the last update used are still in place."""
        used, witness = self.used, self.witness
        return used is not None and witness is not None and witness.look().gradient == used.gradient

    def norm(self, *, wait: bool) -> float | None:
        return self.witness.norm(wait=wait) if self.witness is not None else None


class Fetched(NamedTuple):
    """A batch that was fetched: its number in its pass, what it is made of, and how many the pass has.

    `in_order` is the size of a batch where the items come in the order of the dataset.
    """

    position: int
    items: int | None
    dataset: int
    length: int | None
    in_order: int | None
    direct: bool  # the user's own code asked for it


class Habits:
    """The ledger. Fed by the hooks; `look` is called when there is enough of it to be judged."""

    def __init__(self, look: Callable[[Habits], None]) -> None:
        self._look = look
        self.listening = False  # until it is switched on
        self.awake = False
        self.mode: tuple[bool, bool] | None = None  # of the last root module: training, gradients
        self.events: list[Event] = []
        self.optimizers: dict[int, Watched] = {}
        self.reach = Reach()
        self.steps = 0  # of any optimizer
        self.wants_norms = False  # also where they must be waited for: something is suspected
        self._woke = 0
        self._last = _FIRST
        self._wakes = 0
        self._backwards = 0
        self._numbers: dict[int, int] = {}
        self._objects: dict[int, Any] = {}  # weak references, by number
        self._count = 0
        self._stepping = False
        self._places: dict[tuple[int, int], tuple[int, Place, CodeType]] = {}
        self._idle = 0  # batches and forward passes since anything else happened

    def start(self) -> None:
        self.listening = self.awake = True

    def stop(self) -> None:
        """For good."""
        self.listening = self.awake = False
        self.events.clear()

    def reset(self) -> None:
        """In a forked child, whose loop is another one."""
        self.events.clear()
        self.steps = self._woke = 0

    # Sleep

    def wake(self) -> None:
        """Something has changed: note the next steps."""
        if not self.listening or self.awake or self._wakes >= _WAKES:
            return
        self._wakes += 1
        self.listening = self._wakes < _WAKES
        self.awake = True
        self._woke, self._last = self.steps, _AGAIN
        self._backwards = 0
        self._add("gap", 0, None)

    def _sleep(self) -> None:
        self.judge()
        self.awake = False

    @contained("observe.habits")
    def judge(self) -> None:
        if self.events:
            self._look(self)

    # Numbers

    def number(self, thing: Any) -> int:
        """A number for an object, which no other object ever gets."""
        key = id(thing)
        found = self._numbers.get(key)
        if found is not None:
            return found
        self._count += 1
        number = self._numbers[key] = self._count
        numbers, objects = self._numbers, self._objects

        def gone(_: Any) -> None:
            if numbers.get(key) == number:
                del numbers[key]
            objects.pop(number, None)

        objects[number] = weakref.ref(thing, gone)
        return number

    def thing(self, number: int) -> Any:
        """The object of a number; None where it is gone."""
        reference = self._objects.get(number)
        return reference() if reference is not None else None

    def lost_ratio(self, number: int) -> tuple[float, float] | None:
        """Norms of the gradients that an update used, and of all that there were before some were cleared."""
        watched = self.optimizers.get(number)
        return watched.thrown_away.norms() if watched is not None else None

    # Events

    def _add(self, kind: str, who: int, frame: FrameType | None, fact: Any = None) -> None:
        if kind not in ("forward", "fetch"):
            self._idle = 0
        elif self._idle >= _IDLE:
            return
        else:
            self._idle += 1
        site, place = self._where(frame) if frame is not None else (0, _NOWHERE)
        states = {
            watched.number: watched.witness.look()
            for watched in self.optimizers.values()
            if watched.witness is not None
        }
        self.events.append(Event(kind, who, site, place, states, self.steps, fact))
        if len(self.events) >= _MOST:
            self.listening = False
            self._sleep()

    def _where(self, frame: FrameType) -> tuple[int, Place]:
        """Where a call comes from. To ask a frame for its line takes long, so lines of the user's are remembered."""
        outer = outside_torch(frame)
        if outer is None:
            return 0, _NOWHERE
        key = (id(outer.f_code), outer.f_lasti)
        known = self._places.get(key)
        if known is not None:
            return known[0], known[1]
        user = user_frame(outer)
        place = Place(user.f_code.co_filename, user.f_lineno) if user is not None else _NOWHERE
        site = hash(key)
        if user is outer and len(self._places) < 256:
            self._places[key] = (site, place, outer.f_code)  # the code is kept, so that its identity stays its own
        return site, place

    @contained("observe.habits")
    def optimizer_built(self, optimizer: Any, frame: FrameType | None) -> None:
        self.wake()
        user = user_frame(frame)
        built = Place(user.f_code.co_filename, user.f_lineno) if user is not None else None
        number = self.number(optimizer)
        self.optimizers[number] = Watched(optimizer, number, built)
        for dead in [key for key, watched in self.optimizers.items() if watched.optimizer is None]:
            del self.optimizers[dead]

    def _watched(self, optimizer: Any) -> Watched:
        number = self.number(optimizer)
        found = self.optimizers.get(number)
        if found is None:
            found = self.optimizers[number] = Watched(optimizer, number, None)
        return found

    @contained("observe.habits")
    def zero_begins(self, owner: Any, frame: FrameType) -> None:
        self._add("zero", self.number(owner), frame)
        for watched in self.optimizers.values():
            optimizer = watched.optimizer
            if optimizer is not None and (optimizer is owner or isinstance(owner, torch.nn.Module)):
                watched.thrown_away.clearing(optimizer)

    @contained("observe.habits")
    def zero_ended(self, owner: Any) -> None:
        self._add("zero done", self.number(owner), None)

    @contained("observe.habits")
    def backward_begins(self, roots: Any, frame: FrameType) -> None:
        self._backwards += 1
        if 2 <= self._backwards <= 5:
            self.reach.walk(roots, self.steps)
        norms = {}
        if self.steps - self._woke < _NORMS:
            for number, watched in self.optimizers.items():
                # What was cleared before everybody's eyes need not be measured.
                if watched.is_used_gradient():
                    norms[number] = watched.norm(wait=self.wants_norms)
        is_mean = bool(roots) and all(isinstance(root, torch.Tensor) and _is_mean(root.grad_fn) for root in roots)
        self._add("backward", 0, frame, (self._stepping, norms, is_mean))

    @contained("observe.habits")
    def backward_ended(self) -> None:
        for watched in self.optimizers.values():
            if watched.witness is None:
                watched.find_witness()
            watched.thrown_away.backward()
        self._add("backward done", 0, None, self._stepping)

    @contained("observe.habits")
    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        watched = self._watched(optimizer)
        watched.thrown_away.step(optimizer)
        groups = optimizer.param_groups
        has_gradient = any(tensor.grad is not None for group in groups for tensor in group["params"])
        self._stepping = True
        self._add("step", watched.number, frame, (has_gradient, _rates(optimizer)))

    @contained("observe.habits")
    def step_ended(self, optimizer: Any, *, stepped: bool) -> None:
        self._stepping = False
        watched = self._watched(optimizer)
        self._add("step done" if stepped else "step skipped", watched.number, None)
        watched.used = self.events[-1].states.get(watched.number) if self.events else None
        self.steps += 1
        since = self.steps - self._woke
        if since >= self._last:
            self._sleep()
        elif since in _LOOKS:
            self.judge()

    @contained("observe.habits")
    def clip_begins(self, bound: Any, frame: FrameType) -> None:
        self._add("clip", 0, frame, float(bound) if isinstance(bound, float | int) else None)

    @contained("observe.habits")
    def clip_ended(self) -> None:
        self._add("clip done", 0, None)

    @contained("observe.habits")
    def unscale_begins(self, optimizer: Any, frame: FrameType) -> None:
        self._add("unscale", self.number(optimizer), frame)

    @contained("observe.habits")
    def unscale_ended(self, optimizer: Any) -> None:
        self._add("unscale done", self.number(optimizer), None)

    @contained("observe.habits")
    def scaler_steps(self, optimizer: Any, frame: FrameType) -> None:
        self._add("scaler step", self.number(optimizer), frame)

    @contained("observe.habits")
    def scaled(self, scaler: Any) -> None:
        if scaler.is_enabled():
            self._add("scale", self.number(scaler), None, float(getattr(scaler, "_init_scale", 0.0)))

    @contained("observe.habits")
    def scheduled(self, scheduler: Any, frame: FrameType, *, explicit: bool) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        whose = self.number(optimizer) if optimizer is not None else 0
        rates = _rates(optimizer) if optimizer is not None else ()
        self._add("schedule", self.number(scheduler), frame, (whose, explicit, rates))

    @contained("observe.habits")
    def forward(self, module: torch.nn.Module, frame: FrameType | None) -> None:
        mode = (module.training, torch.is_grad_enabled())
        if not self.awake:
            self.wake()
        self.mode = mode
        if self.awake:
            self._add("forward", self.number(module), frame, mode)

    @contained("observe.habits")
    def evaluated(self, module: torch.nn.Module, frame: FrameType) -> None:
        if not self.awake:
            self.wake()
        if self.awake:
            self._add("eval", self.number(module), frame)

    @contained("observe.habits")
    def fetched(self, iterator: Any, indices: Any, frame: FrameType, *, direct: bool) -> None:
        dataset = getattr(iterator, "_dataset", None)
        position = getattr(iterator, "_num_yielded", 0)
        known = hash(tuple(indices)) if isinstance(indices, list | tuple) and _are_numbers(indices) else None
        length = in_order = None
        if known is not None and position <= 1:
            sampler = iterator._index_sampler
            length = len(sampler)
            if type(getattr(sampler, "sampler", None)) is SequentialSampler:
                in_order = getattr(sampler, "batch_size", None)
        number = self.number(dataset) if dataset is not None else 0
        self._add("fetch", number, frame, Fetched(position, known, number, length, in_order, direct))


def _is_mean(node: Any) -> bool:
    """Whether the loss is a mean over several values, with nothing done to it afterwards."""
    name = type(node).__name__
    if name == "MeanBackward0":
        return bool(getattr(node, "_saved_self_numel", 0) > 1)
    return name.startswith(("NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss")) and node._saved_reduction == 1


def _rates(optimizer: Any) -> tuple[float | None, ...]:
    """The learning rates of all groups; None for one that is kept in a tensor, which may be on a device."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return tuple(float(rate) if isinstance(rate, float | int) else None for rate in rates)


def _are_numbers(indices: list[Any] | tuple[Any, ...]) -> bool:
    return bool(indices) and all(type(index) is int for index in indices)
