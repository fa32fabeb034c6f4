"""Runs that end while the learning rate still rises towards what it is meant to be.

Only the end of a run shows that, and the objects of the script are gone by then. So the looks at an optimizer note what
the end may need. A short trial of a long training also ends in its warm-up. So the run must have gone through its data
several times while the loss did not fall, or the schedule must be as long as the run and have moved now and then only.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator

from torch.optim.lr_scheduler import OneCycleLR

from torchmedic.detect.loop.incident import LoopIncident, RateDecayed
from torchmedic.observe.loop.events import Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.optimizer_looks import MAX_PLAIN_RATE, Steady, Warming
from torchmedic.source.live_frames import stack_of
from torchmedic.source.lookup.optimizers import rate_set_at, schedulers_of
from torchmedic.source.spots import NOWHERE, Place
from torchmedic.source.syntax import callee, calls_in, last_name, nodes_in
from torchmedic.source.user_variables import user_trees

_MIN_LOOKS = 4
_MAX_SHARE = 0.1  # of the rate with which an optimizer was built
_MIN_UPDATES = 100  # of a run that is no trial
_MIN_PASSES = 3  # over the data
_MAX_LENGTHS = 0.05  # between the length of a schedule and the number of updates
_MIN_UPDATES_PER_MOVE = 8


def find(habits: Habits) -> Iterator[LoopIncident]:
    for number, watched in list(habits.optimizers.items()):
        known = habits.standstill.of(watched.optimizer) if watched.optimizer is not None else None
        if known is not None and not habits.is_ending:
            steps = [event for event in habits.events if event.kind == "step" and event.who == number]
            known.warming = _warming(watched, known, steps[-1].place if steps else NOWHERE)
    if habits.is_ending and getattr(sys, "last_type", None) is None:
        for known in habits.standstill.watched.values():
            yield from _at_the_end(habits, known)


def _warming(watched: Watched, known: Steady, update: Place) -> Warming | None:
    """A rate that has only risen, and is a small share of what the optimizer or the schedule was built with."""
    cycles = [each for each in schedulers_of(watched.optimizer) if isinstance(each, OneCycleLR)]
    rates, meant = [each.rate for each in known.rates], watched.optimizer.defaults.get("lr")
    if len(cycles) == 1:
        meant = watched.optimizer.param_groups[0].get("max_lr", meant)
    if len(rates) < _MIN_LOOKS or not isinstance(meant, float) or not rates[-1] < _MAX_SHARE * meant:
        return None
    if meant > MAX_PLAIN_RATE or rates[-1] <= rates[0] or any(b < a for a, b in itertools.pairwise(rates)):
        return None  # a larger number may be a factor
    found = rate_set_at(stack_of(sys._getframe()), watched.optimizer, "cause", "")
    return Warming(
        moved=_moved_at() if cycles else None,
        cause=Place(found.file, found.line) if found is not None else _setting() or watched.built or update,
        update=update,
        optimizer=watched.number,
        meant=meant,
        length=cycles[0].total_steps if len(cycles) == 1 else 0,
        moves=cycles[0].last_epoch if len(cycles) == 1 else 0,
    )


def _setting() -> Place | None:
    """The only setting of a warm-up in the user's files, for a library that builds the schedule: `warmup_steps=500`."""
    words = [
        Place(file, word.value.lineno)
        for file, tree in user_trees()
        for call in calls_in(tree)
        for word in call.keywords
        if word.arg is not None and "warmup" in word.arg
    ]
    return words[0] if len(words) == 1 else None


def _at_the_end(habits: Habits, known: Steady) -> Iterator[LoopIncident]:
    warming, updates = known.warming, habits.standstill.updates
    if warming is None:
        return
    is_as_long = abs(warming.length - updates) <= _MAX_LENGTHS * updates
    is_per_epoch = is_as_long and _MIN_UPDATES_PER_MOVE * warming.moves <= warming.length
    lengths = [event.fact.length for event in habits.events if event.kind == "fetch" and event.fact.length]
    is_no_trial = bool(lengths) and updates >= max(_MIN_UPDATES, _MIN_PASSES * max(lengths))
    if is_per_epoch or (is_no_trial and habits.standstill.is_loss_still):
        yield RateDecayed(
            step=known.rates[-1].step,
            cause=warming.moved if is_per_epoch and warming.moved is not None else warming.cause,
            optimizer=warming.optimizer,
            update=warming.update,
            built=warming.cause if is_per_epoch else None,
            schedule="OneCycleLR" if warming.length else "",
            is_per_update=False,
            reason="per epoch" if is_per_epoch else "warming",
            first=warming.meant,
            rate=known.rates[-1].rate,
            since=0,
            updates=updates,
        )


def _moved_at() -> Place | None:
    """The only line that has a schedule of one cycle move; None where several do."""
    trees = list(user_trees())
    assigned = [node for _, tree in trees for node in nodes_in(tree) if isinstance(node, ast.Assign)]
    made = [node for node in assigned if isinstance(node.value, ast.Call) and callee(node.value) == OneCycleLR.__name__]
    names = {last_name(target) for node in made for target in node.targets}
    calls = [(file, call) for file, tree in trees for call in calls_in(tree, "step")]
    calls = [
        (file, call)
        for file, call in calls
        if isinstance(call.func, ast.Attribute) and last_name(call.func.value) in names
    ]
    return Place(calls[0][0], calls[0][1].lineno) if len(calls) == 1 else None
