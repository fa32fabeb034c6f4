"""What this rank tells of its training, for a comparison with the other ranks: first batches, order, weights, device.

Everything is read in the first steps; later only a sample of the weights is read after 2, 4, 8, 16 ... updates, and
only where that needs no wait for a device. Nothing is sent to other ranks: the facts are a file of this process.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from torchmedic.contained import contained
from torchmedic.observe.ranks.call_site import MAX_USER_FRAMES
from torchmedic.observe.ranks.early_exchanges import EarlyExchanges
from torchmedic.observe.ranks.models import Models
from torchmedic.observe.ranks.passes import Passes, has_epoch, sampler_of
from torchmedic.observe.ranks.samples import fingerprint_of, identity_of, line_of, size_of, stream_of
from torchmedic.observe.ranks.underway import Underway
from torchmedic.observe.ranks.wrapping import Frozen, may_train_apart
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import StackFrame
from torchmedic.records.rank_facts import RankFacts, WeightSample
from torchmedic.runfolder.files import RANK_FACTS, write_atomically
from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.user_code import user_frame

_MAX_BATCHES = 4
_MAX_ITEMS = 4
_MAX_NAMES = 512  # of parameters
_MAX_WEIGHTS = 8
_MAX_SAMPLES = 24  # of the weights
_MIN_ALIKE_UPDATES = 3  # with the same number of exchanges
_FIRST_UPDATES = 16  # that are looked at one by one
_MIN_UPDATES_BY_HAND = 4  # before the inputs of a model are taken for a batch: a short try may use any data


class FactsOfRank:
    """Collects the facts of one process from the moment it joins a job of several ranks."""

    def __init__(self, folder: Path, rank: int, world_size: int, batches: Batches, clock: Clock) -> None:
        self._path = folder / RANK_FACTS
        self._batches = batches
        self._clock = clock
        self._facts = RankFacts(rank=rank, pid=os.getpid(), world_size=world_size, host=socket.gethostname())
        self._fetched: tuple[str, str, StackFrame | None, StackFrame | None] | None = None
        self._has_loader: bool | None = None  # None until the first batch is known
        self._passes: WeakTable[Passes] = WeakTable()
        self._reading: weakref.ref[Any] | None = None  # the sampler of the last batch
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._optimizer: weakref.ref[Any] | None = None  # of these weights
        self._names: dict[int, str] = {}  # of the parameters in wrapped models, by identity
        self._wrapper: weakref.ref[Any] | None = None  # the last one
        self.updates = 0  # counted by the hooks
        self.due = 1  # updates after which `stepped` is to be called; the hooks ask for nothing before
        self.begins = True  # whether the hooks are to tell of the beginning of an update
        self._next_sample, self._past_rates = 1, 0.0
        self._exchanges = 0  # forwards whose backward exchanges gradients,
        self._exchanges_before = 0  # and those of earlier updates
        self._micro_steps = 0  # backwards of the update under way
        self._syncs: list[int] = []  # exchanges of the last updates
        self._frozen, self._models = Frozen(), Models()
        self._underway, self._early = Underway(), EarlyExchanges(clock)
        self._alone: tuple[StackFrame, ...] = ()  # the lines of the last forward, if it was under `no_sync`

    @property
    def wants_batches(self) -> bool:
        """Whether every batch is of interest: a loader has given one, and more of them are to be compared."""
        if self._has_loader is False:
            return False
        return self._fetched is not None or 0 < len(self._facts.batches) < _MAX_BATCHES

    # What the hooks tell

    @contained("observe.rank_facts")
    def wrapped(self, frame: FrameType) -> None:
        """A DistributedDataParallel is made; the frame is that of its `__init__`."""
        module, wrapper = frame.f_locals.get("module"), frame.f_locals.get("self")
        kind = torch.nn.parallel.DistributedDataParallel
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # each rank may train them by itself
        known = dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
        parameters = {name: each for name, each in known.items() if name not in ignored}
        if isinstance(wrapper, kind) and wrapper.process_group.size() == self._facts.world_size:  # all train one model
            self._change(
                wrapper="DistributedDataParallel",
                wrapped_at=line_of(user_frame(frame)),
                parameters=(*self._facts.parameters, *parameters)[:_MAX_NAMES],
                thawed="",
            )
            self._wrapper = weakref.ref(wrapper)
            self._frozen.wrapped(parameters)
        self._names |= {id(parameter): name if name in parameters else "" for name, parameter in known.items()}

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A DistributedDataParallel, the first argument, is called, and its backward will exchange gradients."""
        self._exchanges += 1
        self._alone = ()
        if not self._facts.forwards:
            self._change(forwards=1, is_apart=may_train_apart(args[0]))
        if not self._has_loader and self.updates + 1 == self._next_sample > _MIN_UPDATES_BY_HAND:
            self._given((args[1:], kwargs), sys._getframe(1))

    @contained("observe.rank_facts")
    def forward_alone(self, frame: FrameType | None) -> None:
        """A DistributedDataParallel is called under `no_sync`: its backward exchanges nothing."""
        found: list[StackFrame] = []
        while len(found) < MAX_USER_FRAMES and (line := line_of(own := user_frame(frame))) is not None:
            found.append(line)
            frame = own.f_back if own is not None else None
        self._alone = tuple(found)

    @contained("observe.rank_facts")
    def _given(self, inputs: Any, frame: FrameType) -> None:
        """Without a loader, the inputs of the model are the batch: before the updates 8, 16, 32 and 64."""
        self._has_loader = False
        if self._fetched is None and len(self._facts.batches) < _MAX_BATCHES:
            self._fetched = fingerprint_of(inputs), "", line_of(user_frame(frame)), None

    @contained("observe.rank_facts")
    def fetched(self, iterator: Any, batch: Any, frame: FrameType) -> None:
        """A DataLoader gave a batch."""
        sampler = sampler_of(iterator)
        if getattr(iterator, "_num_yielded", 0) == 1:
            self._begin_pass(sampler)
            self.due = self.updates + 1
        self._reading = weakref.ref(sampler) if sampler is not None and has_epoch(sampler) else None
        if self._has_loader is False:
            return
        self._has_loader = True
        if len(self._facts.batches) < _MAX_BATCHES:
            name = type(sampler).__name__ if sampler is not None else ""
            self._fetched = fingerprint_of(batch), name, line_of(user_frame(frame)), stream_of(iterator)

    @contained("observe.rank_facts")
    def exchanging(self, work: Any, tensors: Any) -> None:
        """A collective was called from Python, in the time of the first updates."""
        self._underway.begun(work, tensors, sys._getframe(1))
        self._early.exchanged(tensors, sys._getframe(1))

    @contained("observe.rank_facts")
    def seen_at(self, what: str, frame: FrameType) -> None:
        """A scheduler has set learning rates (`scheduling`), or a gather fills one tensor (`into_one`)."""
        if getattr(self._facts, what) is None:
            self._change(**{what: line_of(user_frame(frame))})
        self._past_rates += sum(self._rates()) if what == "scheduling" else 0.0

    @contained("observe.rank_facts")
    def step_begins(self, optimizer: Any, frame: FrameType) -> None:
        self._micro_steps = self._clock.micro_step
        self.begins = self.updates < _FIRST_UPDATES
        early, unawaited = self._early.at_update(optimizer), self._underway.at_update(optimizer)
        if (early and not self._facts.early) or (unawaited and not self._facts.unawaited):
            self._change(early=self._facts.early or early, unawaited=self._facts.unawaited or unawaited)
        if self._alone and not self._facts.unsynced:
            self._change(unsynced=self._alone)
        if not self._weights and not self.updates:
            self._choose(optimizer, frame)
            self._sample(0)
        if self.begins:
            self._models.begins(optimizer, frame, self._names)
        else:
            self._names.clear()

    @contained("observe.rank_facts")
    def stepped(self) -> None:
        """The weights were updated."""
        if self._fetched is not None:
            fingerprint, sampler, line, stream = self._fetched
            self._fetched = None
            if not self._facts.batches:
                items = self._items() if self._has_loader else ()
                self._change(items=items, sampler=sampler, loading=line, stream=stream)
            self._change(batches=(*self._facts.batches, fingerprint))
            if len(self._facts.batches) == _MAX_BATCHES:
                self._write()
        self._look_at_order()
        self._count_exchanges()
        if self.updates >= self._next_sample:
            self._next_sample *= 2
            self._sample(self.updates)
            self._write()
        self.due = self.updates + 1 if self.updates < _FIRST_UPDATES else self._next_sample

    @contained("observe.rank_facts")
    def exiting(self) -> None:
        if self.updates and (not self._facts.weights or self._facts.weights[-1].updates != self.updates):
            self._sample(self.updates, at_end=True)
        if self.updates or self._facts.forwards:  # a rank that never updates its weights is told of, too
            self._write()

    def _items(self) -> tuple[int, ...]:
        """The first items of the last batch, as indices of the dataset."""
        found = self._batches.indices
        return tuple(each for each in found if isinstance(each, int))[:_MAX_ITEMS] if isinstance(found, list) else ()

    # The order of the data

    def _begin_pass(self, sampler: Any) -> None:
        if sampler is not None and has_epoch(sampler):
            passes = self._passes.get(sampler)
            if passes is None:
                passes = self._passes[sampler] = Passes()
            passes.begin(int(sampler.epoch))

    def _look_at_order(self) -> None:
        sampler = self._reading() if self._reading is not None else None
        passes = self._passes.get(sampler) if sampler is not None else None
        if passes is not None and passes.trained():
            self._change(same_order=self._facts.same_order + 1)
            self._write()

    # Exchanges for one update

    def _count_exchanges(self) -> None:
        forwards, self._exchanges_before = self._exchanges - self._exchanges_before, self._exchanges
        if self._facts.syncs or self.updates > _FIRST_UPDATES:
            return
        self._syncs.append(min(forwards, self._micro_steps))
        last = self._syncs[-_MIN_ALIKE_UPDATES:]
        if len(last) == _MIN_ALIKE_UPDATES and len(set(last)) == 1 and last[0] > 1:
            self._change(syncs=last[0])
            self._write()

    # Weights

    def _choose(self, optimizer: Any, frame: FrameType) -> None:
        plain = [
            tensor
            for tensor in parameters_of(optimizer)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and tensor.is_floating_point()
        ]
        every = max(1, -(-len(plain) // _MAX_WEIGHTS))
        chosen = plain[::every][:_MAX_WEIGHTS]
        added = self._added()
        if added.keys().isdisjoint(map(id, chosen)):
            chosen[-1:] = [*[tensor for tensor in plain if id(tensor) in added][:1], *chosen[-1:]][:1]
        names = self._names | added
        self._weights = [weakref.ref(tensor) for tensor in chosen]
        self._optimizer = weakref.ref(optimizer)
        gpu = next((tensor.device for tensor in plain if tensor.is_cuda), None)
        called = self._clock.called
        self._change(
            names=tuple(names.get(id(tensor), "") for tensor in chosen),
            added=tuple(added[id(tensor)] for tensor in chosen if id(tensor) in added),
            shapes=tuple(tuple(tensor.shape) for tensor in chosen),
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in plain if tensor.requires_grad),
            calling=StackFrame(file=called[0], line=called[1], function="") if called[0] else None,
            updating=line_of(user_frame(frame)),
            device=identity_of(gpu) if gpu is not None else "",
            devices=torch.cuda.device_count() if gpu is not None else 0,
        )

    def _added(self) -> dict[int, str]:
        """The names of parameters that a model got after it was wrapped, by identity."""
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is None:
            return {}
        ignored = wrapper.parameters_to_ignore
        parameters = wrapper.module.named_parameters()
        return {id(each): name for name, each in parameters if id(each) not in self._names and name not in ignored}

    def _sample(self, updates: int, *, at_end: bool = False) -> None:
        changed = self._frozen.changed() if self._weights and not self._facts.thawed else None
        if changed is not None:
            name, weight, how = changed
            self._weights[-1] = weakref.ref(weight)
            names, shapes = (*self._facts.names[:-1], name), (*self._facts.shapes[:-1], tuple(weight.shape))
            self._change(**{how: name}, names=names, shapes=shapes)
        weights = [tensor for reference in self._weights if (tensor := reference()) is not None]
        if not weights or len(weights) < len(self._weights) or len(self._facts.weights) >= _MAX_SAMPLES:
            return
        if not all(tensor.is_cpu for tensor in weights) and not at_end:
            return  # to read them would wait for the device
        sizes = tuple(map(size_of, weights))
        sample = WeightSample(
            updates=updates, sizes=sizes, rates=self._rates(), past_rates=self._past_rates, exchanges=self._exchanges
        )
        self._change(weights=(*self._facts.weights, sample), models=self._models.sampled())

    def _rates(self) -> tuple[float, ...]:
        optimizer = self._optimizer() if self._optimizer is not None else None
        groups = optimizer.param_groups if optimizer is not None else ()
        return tuple(rate for group in groups if type(rate := group.get("lr")) is float)

    # The file

    def _change(self, **changes: Any) -> None:
        self._facts = msgspec.structs.replace(self._facts, **changes)

    def _write(self) -> None:
        write_atomically(self._path, msgspec.json.encode(self._facts))
