"""Steps, micro-steps and phases, for the loops that people write."""

from __future__ import annotations

from pathlib import Path

from torchmedic.observe.step.blackbox import FileBox
from torchmedic.observe.step.clock import BACKWARD, FORWARD, Clock
from torchmedic.runfolder import black_box


class Optimizer:
    pass


def clock_with(*optimizers: Optimizer) -> Clock:
    clock = Clock()
    for optimizer in optimizers:
        clock.optimizer_built(optimizer)
    return clock


def test_one_optimizer_is_one_step_each() -> None:
    optimizer = Optimizer()
    clock = clock_with(optimizer)
    for _ in range(3):
        clock.data_requested()
        clock.backward_done()
        clock.optimizer_stepped(optimizer)
    assert (clock.step, clock.updates, clock.micro_step) == (3, 3, 0)


def test_accumulation_is_one_step_of_several_micro_steps() -> None:
    optimizer = Optimizer()
    clock = clock_with(optimizer)
    seen = []
    for batch in range(8):
        clock.data_requested()
        clock.backward_done()
        seen.append((clock.step, clock.micro_step))
        if batch % 4 == 3:
            clock.optimizer_stepped(optimizer)
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_the_two_optimizers_of_a_gan_share_a_step() -> None:
    judge, maker = Optimizer(), Optimizer()
    clock = clock_with(judge, maker)
    for _ in range(5):
        clock.data_requested()
        clock.optimizer_stepped(judge)
        assert clock.updates == clock.step + 1
        clock.optimizer_stepped(maker)
    assert clock.step == 5


def test_an_optimizer_that_never_steps_does_not_stop_the_clock() -> None:
    used, unused = Optimizer(), Optimizer()
    clock = clock_with(used, unused)
    for _ in range(4):
        clock.data_requested()
        clock.optimizer_stepped(used)
    assert (clock.step, clock.updates) == (3, 4)
    clock.data_requested()
    assert clock.step == 4


def test_a_loop_without_a_loader_and_two_optimizers() -> None:
    used, unused = Optimizer(), Optimizer()
    clock = clock_with(used, unused)
    for _ in range(4):
        clock.optimizer_stepped(used)
    assert clock.updates == 4


def test_a_phase_is_written_with_the_users_line(tmp_path: Path) -> None:
    clock = Clock()
    clock.box = FileBox(tmp_path / "box")
    clock.enter(FORWARD)
    clock.enter(BACKWARD)

    moments = black_box.read(tmp_path / "box").moments

    assert [moment.phase for moment in moments] == ["forward", "backward"]
    assert {moment.file for moment in moments} == {__file__}
    assert moments[1].line == moments[0].line + 1
    assert moments[0].rss > 1 << 20


def test_a_child_is_given_a_box_when_it_trains(tmp_path: Path) -> None:
    clock = Clock()
    opened = []
    clock.open_box = lambda: opened.append(1)
    clock.enter(FORWARD)
    assert opened == []
    clock.enter(BACKWARD)
    assert opened == [1]


def at_line(clock: Clock, line: int) -> None:
    clock.file, clock.line = "train.py", line
    clock.backward_done()


def test_a_loop_without_an_optimizer_is_counted_by_the_line_that_computes_gradients() -> None:
    clock = Clock()
    for _ in range(6):
        at_line(clock, 10)  # a penalty
        at_line(clock, 12)  # the gradients of the weights
    assert (clock.step, clock.updates) == (5, 6)


def test_gradients_that_are_computed_once_are_no_step() -> None:
    clock = Clock()
    at_line(clock, 10)
    assert (clock.step, clock.updates) == (0, 0)


def test_gradients_before_the_first_optimizer_are_no_steps() -> None:
    clock, optimizer = Clock(), Optimizer()
    for _ in range(6):
        at_line(clock, 10)
    clock.optimizer_built(optimizer)
    assert (clock.step, clock.updates) == (0, 0)
    del optimizer
    for _ in range(6):
        at_line(clock, 10)  # what is looked at after training
    assert clock.updates == 0
