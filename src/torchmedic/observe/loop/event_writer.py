"""What the hooks see of the user's loop, written into the ledger: one method for each kind of event."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from torchmedic.contained import contained
from torchmedic.observe.loop.batch_looks import look_at, targets_of
from torchmedic.observe.loop.events import (
    BackwardFact,
    EmptiedFact,
    Fetched,
    ForwardFact,
    ScheduleFact,
    Watched,
    are_numbers,
    epoch_of,
    is_mean,
    nearest_owner,
    rates,
    step_fact,
)
from torchmedic.observe.loop.ledger import STEPS_AFTER_CHANGE, Habits
from torchmedic.observe.loop.loads import own_states, unmatched, writes_of
from torchmedic.observe.loop.pair_tables import table_of
from torchmedic.observe.loop.passes import SHUFFLING, length_of
from torchmedic.observe.loop.picture_looks import cut_pictures
from torchmedic.observe.step.wrappers import inside
from torchmedic.source.spots import Place
from torchmedic.source.user_code import is_user_file, user_frame

_BACKWARDS_WITHOUT_STEP = 32  # after which a loop without an update is judged
_MAX_METRICS = 64  # that a schedule was given to compare
_TIMED = range(9, 21)  # calls of `empty_cache`; a step before them also pays for the check-up of the first steps
_MAX_TARGETS = 6  # calls of backward whose targets are compared with suspicious labels
_NORM_STEPS = 24  # in which the witness is also measured, on the CPU
_LOOK_STEPS = frozenset({6, 12, 24, 40})  # since the ledger woke, at which the evidence is judged


class EventWriter(Habits):
    """The ledger as the hooks know it."""

    def __init__(self, look: Callable[[Habits], None], prepare: Callable[[], object]) -> None:
        super().__init__(look, prepare)
        self._stepping = False
        self._emptied = 0  # times that the user has emptied the cache of the device
        self._emptying = (0.0, 0.0)
        self._asked = 0  # calls of backward for their targets
        self._has_labels = False  # that the next call of backward is asked for

    @contained("observe.habits")
    def optimizer_built(self, optimizer: Any, frame: FrameType | None) -> None:
        if not self.listening and not self.awake:
            return
        if not self.optimizers:
            self._prepare()
        self.wake()
        user = user_frame(frame)
        built = Place(user.f_code.co_filename, user.f_lineno) if user is not None else None
        caller = user_frame(user.f_back) if user is not None else None
        number = self.number(optimizer)
        known = self.optimizers.get(number)
        if known is None or known.built is None:  # `load_state_dict` comes here for one that was built before
            watched = self.optimizers[number] = Watched(optimizer, number, built)
            watched.caller = Place(caller.f_code.co_filename, caller.f_lineno) if caller is not None else None
        else:
            known.loaded = built
        for dead in [key for key, watched in self.optimizers.items() if watched.reference() is None]:
            del self.optimizers[dead]

    def _watched(self, optimizer: Any) -> Watched:
        number = self.number(optimizer)
        found = self.optimizers.get(number)
        if found is None:
            found = self.optimizers[number] = Watched(optimizer, number, None)
        return found

    @contained("observe.habits")
    def zero_begins(self, owner: Any, frame: FrameType) -> None:
        number = self.number_inside(owner, self.optimizers)
        self._add("zero", number, frame)
        for watched in self.optimizers.values():
            optimizer = watched.optimizer
            if optimizer is not None and (watched.number == number or isinstance(owner, torch.nn.Module)):
                watched.thrown_away.clearing(optimizer)

    @contained("observe.habits")
    def zero_ended(self, owner: Any) -> None:
        self._add("zero done", self.number_inside(owner, self.optimizers), None)

    @contained("observe.habits")
    def backward_begins(self, roots: Any, frame: FrameType) -> None:
        self._backwards += 1
        if is_early := 2 <= self._backwards <= 5:
            self.reach.walk(roots, self.steps, self.owned)
            self.pair_tables.append((table_of(roots), self._where(frame)[1]))
        nearest = nearest_owner(roots, self.optimizers.values()) if is_early else 0
        norms = {}
        if self.steps - self._woke < _NORM_STEPS:
            for number, watched in self.optimizers.items():
                # What was cleared before everybody's eyes need not be measured.
                if watched.is_used_gradient():
                    norms[number] = watched.norm(wait=self.wants_norms)
        means = bool(roots) and all(isinstance(root, torch.Tensor) and is_mean(root.grad_fn) for root in roots)
        targets = frozenset[int]()
        if self._has_labels and self._asked < _MAX_TARGETS:
            self._asked += 1
            targets = targets_of(roots)
        self._has_labels = False
        self._add("backward", 0, frame, BackwardFact(self._stepping, norms, means, targets, nearest))
        if not self.optimizers and self.events:
            self.by_hand.backward_begins(roots, self.events[-1].place)
        if not self.growth.over and self.events:
            self.growth.backward_begins(roots, self.steps or self._backwards, self.events[-1].place)

    @contained("observe.habits")
    def backward_ended(self) -> None:
        for watched in self.optimizers.values():
            if watched.witness is None:
                watched.find_witness()
            watched.thrown_away.backward()
        if not self.optimizers:
            self.by_hand.backward_ended()
        self._add("backward done", 0, None, self._stepping)
        if not self.optimizers and not self.growth.over:  # weights are updated by hand, once per backward or not
            self.growth.step_ended(sys._getframe(1))
            if self._backwards == STEPS_AFTER_CHANGE:
                self.judge()
        elif self._backwards % _BACKWARDS_WITHOUT_STEP == 0 and not self.steps:
            self.judge()

    @contained("observe.habits")
    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        watched = self._watched(optimizer)
        watched.thrown_away.step(optimizer)
        self._stepping = True
        if not watched.overwrites.is_over:
            watched.overwrites.step_begins(optimizer)
        self._add("step", watched.number, frame, step_fact(optimizer, watched))

    @contained("observe.habits")
    def step_ended(self, optimizer: Any, *, stepped: bool) -> None:
        self._stepping = False
        watched = self._watched(optimizer)
        self._add("step done" if stepped else "step skipped", watched.number, None)
        if not watched.overwrites.is_over:
            watched.overwrites.step_ended()
        watched.used = self.events[-1].states.get(watched.number) if self.events else None
        self.steps += 1
        if not self.growth.over:
            self.growth.step_ended(sys._getframe(1))
        since = self.steps - self._woke
        if since >= self._last:
            self._sleep()
        elif since in _LOOK_STEPS:
            self.judge()

    @contained("observe.habits")
    def clip_begins(self, clipped: Any, bound: Any, frame: FrameType) -> None:
        owner = self._owner_of(clipped)
        self._add("clip", owner, frame, float(bound) if isinstance(bound, float | int) else None)

    def _owner_of(self, clipped: Any) -> int:
        """The optimizer of the first clipped tensor; 0 where it is not known, as of a generator of the user's."""
        if isinstance(clipped, GeneratorType) and clipped.gi_code is torch.nn.Module.parameters.__code__:
            clipped = list(clipped.gi_frame.f_locals["self"].parameters()) if clipped.gi_frame is not None else []
        first = clipped[0] if isinstance(clipped, list | tuple) and clipped else clipped
        for number, watched in self.optimizers.items():
            if any(tensor is first for tensor in watched.parameters):
                return number
        return 0

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
    def cache_emptying(self, frame: FrameType) -> None:
        """The user gives cached memory back to the driver. What is measured is not how long the device was busy."""
        self._emptied += 1
        if self._emptied in _TIMED and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        began = perf_counter()
        self._add("empty cache", 0, frame)
        self._emptying = (began, perf_counter())

    @contained("observe.habits")
    def cache_emptied(self) -> None:
        began, called = self._emptying
        if self._emptied in _TIMED:
            self._add("cache emptied", 0, None, EmptiedFact(began, perf_counter() - called))

    @contained("observe.habits")
    def scaled(self, scaler: Any) -> None:
        if scaler.is_enabled():
            self._add("scale", self.number(scaler), None, float(getattr(scaler, "_init_scale", 0.0)))

    @contained("observe.habits")
    def scheduled(self, scheduler: Any, frame: FrameType, *, explicit: bool) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        whose = self.number(optimizer) if optimizer is not None else 0
        lr = rates(optimizer) if optimizer is not None else ()
        self._add("schedule", self.number(scheduler), frame, ScheduleFact(whose, explicit, lr, epoch_of(scheduler)))

    @contained("observe.habits")
    def measured(self, schedule: Any, metric: Any) -> None:
        """A schedule is given a number to compare, which it reads itself."""
        known = self.metrics.setdefault(self.number(schedule), [])
        if isinstance(metric, float | int | torch.Tensor) and len(known) < _MAX_METRICS:
            known.append(float(metric))

    @contained("observe.habits")
    def forward(self, module: torch.nn.Module, frame: FrameType) -> None:
        mode = (module.training, torch.is_grad_enabled())
        if not self.awake:
            self.wake()
        self.mode = mode
        if self.awake:
            self._add("forward", self.number(module), frame, ForwardFact(*mode))
            self.evaluation.forward(module, frame)
            if mode == (True, False):
                self.teachers.forward(module, self.events[-1].who, self.events[-1].place, self.steps)

    @contained("observe.habits")
    def evaluated(self, module: torch.nn.Module, frame: FrameType) -> None:
        if not self.awake:
            self.wake()
        if self.awake:
            self._add("eval", self.number(inside(module)), frame)

    @contained("observe.habits")
    def pass_begins(self, iterator: Any, updates: int, frame: FrameType) -> None:
        """A batch is asked for, the first of a pass over the data, after some updates."""
        place, sampler = self._where(frame)[1], iterator._index_sampler
        numbers = self.optimizers
        if self.passes.on and self.passes.begins(iterator, self.number(iterator._dataset), updates, numbers, place):
            self.judge()
        if not self.awake or self.steps or not self.optimizers or not torch.is_grad_enabled():
            return  # not a loop that trains
        if not isinstance(sampler, BatchSampler) or length_of(sampler) != 0:
            return
        if place.line and self.empty is None:
            self.empty = (place, len(iterator._dataset), sampler.batch_size)

    @contained("observe.habits")
    def loading(self, frame: FrameType, module: Any, state_dict: Any, strict: bool = True, *_: Any, **__: Any) -> None:
        """A state is about to be loaded. If it fits, here or in another module, it takes a finding back."""
        number = self.number(module)
        self.unmatched = [each for each in self.unmatched if each.module != number]
        found = None if strict else unmatched(state_dict, module, self._where(frame)[1], number)
        if found is not None:
            self.unmatched.append(found)
        else:
            self.unmatched = [each for each in self.unmatched if each.state != id(state_dict)]
        self.teachers.loading(state_dict, number)
        if self.steps and is_user_file(frame.f_code.co_filename):
            self.own_states += own_states(state_dict, module, self._where(frame)[1])
            owners = list(self.optimizers.values())
            self.set_backs.loading(state_dict, module, number, self._where(frame)[1], owners, self.steps)

    @contained("observe.habits")
    def loaded(self, _: FrameType, module: Any, *__: Any, **___: Any) -> None:
        """A state was loaded. Tensors that have changed take a finding back: the module knows other names as well."""
        if self.unmatched and self.unmatched[-1].writes != writes_of(module):
            self.unmatched.pop()

    @contained("observe.habits")
    def fetched(self, iterator: Any, indices: Any, batch: Any, frame: FrameType, *, direct: bool) -> None:
        dataset = getattr(iterator, "_dataset", None)
        position = getattr(iterator, "_num_yielded", 0)
        known = hash(tuple(indices)) if isinstance(indices, list | tuple) and are_numbers(indices) else None
        length = in_order = None
        drawn = 0
        workers = getattr(iterator, "_num_workers", 0) if getattr(iterator, "_worker_init_fn", None) is None else 0
        if known is not None and position <= 1:
            sampler = iterator._index_sampler
            length = length_of(sampler)
            if type(getattr(sampler, "sampler", None)) is SequentialSampler:
                in_order = getattr(sampler, "batch_size", None)
            drawn = len(indices) if isinstance(getattr(sampler, "sampler", None), SHUFFLING) else 0
        whose = self.number(dataset) if dataset is not None else 0
        look = look_at(batch)
        self._has_labels = self._has_labels or bool(look.labels)
        cut = cut_pictures(batch, dataset, indices, frame) if known is not None and position <= 1 else None
        fact = Fetched(position, known, whose, length, in_order, workers, direct, look, drawn, cut)
        self._add("fetch", whose, frame, fact)
