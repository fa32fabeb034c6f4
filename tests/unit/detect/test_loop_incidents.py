"""The ledger of a loop: what it notes, when it sleeps, and that it keeps nothing alive."""

from __future__ import annotations

import gc
import sys
import weakref

import torch
from torch import nn

from torchmedic.detect.loop.intervals import intervals
from torchmedic.observe.loop.event_writer import EventWriter


class Loop:
    """A loop that tells the ledger what it does, as the hooks would."""

    def __init__(self) -> None:
        looks = self.looks = list[int]()
        self.habits = EventWriter(lambda habits: looks.append(habits.steps), lambda: None)
        self.habits.start()
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.habits.optimizer_built(self.optimizer, sys._getframe())

    def backward(self) -> None:
        loss = self.model(torch.ones(1, 2)).sum()
        if self.habits.awake:
            self.habits.backward_begins((loss,), sys._getframe())
        loss.backward()
        if self.habits.awake:
            self.habits.backward_ended()

    def clear(self) -> None:
        if self.habits.awake:
            self.habits.zero_begins(self.optimizer, sys._getframe())
        self.optimizer.zero_grad()
        if self.habits.awake:
            self.habits.zero_ended(self.optimizer)

    def update(self) -> None:
        if self.habits.awake:
            self.habits.step_begins(self.optimizer, sys._getframe())
        self.optimizer.step()
        if self.habits.awake:
            self.habits.step_ended(self.optimizer, stepped=True)

    def intervals(self) -> list[list[str]]:
        (number,) = self.habits.optimizers
        return [[act.kind for act in part.acts] for part in intervals(self.habits.events, number)]


def test_an_interval_holds_what_happened_to_the_gradients() -> None:
    loop = Loop()
    for _ in range(2):
        loop.backward()
        loop.backward()
        loop.update()
        loop.clear()
    assert loop.intervals() == [["backward", "backward"], ["zero", "backward", "backward"]]


def test_a_clearing_that_changes_nothing_is_none() -> None:
    loop = Loop()
    loop.clear()
    loop.backward()
    loop.update()
    assert loop.intervals() == [["backward"]]


def test_gradients_written_by_hand_are_noticed() -> None:
    loop = Loop()
    for _ in range(2):
        loop.backward()
        assert loop.model.weight.grad is not None
        loop.model.weight.grad.mul_(2)
        loop.update()
    (number,) = loop.habits.optimizers
    assert all(part.touched for part in intervals(loop.habits.events, number))


def test_it_sleeps_after_the_first_steps_and_wakes_for_another_optimizer() -> None:
    loop = Loop()
    for _ in range(100):
        loop.backward()
        loop.update()
    assert not loop.habits.awake
    assert loop.habits.steps == 64
    assert loop.looks[-1] == 64
    noted = len(loop.habits.events)

    other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.habits.optimizer_built(other, sys._getframe())
    assert loop.habits.awake
    assert [event.kind for event in loop.habits.events[noted:]] == ["gap"]


def test_it_is_woken_a_few_times_only() -> None:
    loop = Loop()
    for _ in range(20):
        for _ in range(70):
            loop.backward()
            loop.update()
        loop.habits.wake()
    assert len([event for event in loop.habits.events if event.kind == "gap"]) == 4
    assert not loop.habits.awake


def test_it_keeps_nothing_alive() -> None:
    loop = Loop()
    for _ in range(3):
        loop.backward()
        loop.update()
    habits, model, optimizer = loop.habits, weakref.ref(loop.model), weakref.ref(loop.optimizer)
    weight = weakref.ref(loop.model.weight)
    del loop
    gc.collect()
    assert habits.events
    assert (model(), optimizer(), weight()) == (None, None, None)
