"""When a loss counts as far from its level, and when its question is asked."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from torchmedic.observe.numbers.growth_question import GrowthQuestion
from torchmedic.observe.numbers.loss_trend import LossTrend


def _far(losses: list[float]) -> int:
    trend = LossTrend(losses[0])
    for loss in losses[1:]:
        trend.note(loss)
    return trend.far


def test_a_loss_that_stays_above_its_level_is_far() -> None:
    assert _far([1.0, 0.8, *[12.0] * 60]) == 60


def test_a_loss_beyond_all_measure_is_lost_whatever_it_began_with() -> None:
    trend = LossTrend(1e30)
    for _ in range(6):
        trend.note(1e30)
    assert trend.lost == 6


def test_a_loss_that_was_learned_and_is_lost_again_is_far() -> None:
    falling = [2.3 * 0.97**step for step in range(200)]
    assert _far([*falling, *[2.3] * 50]) == 50


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 0.5, *[40.0] * 10, *[0.4] * 20],  # a spike
        [1e-3, *[1e-6] * 200, *[1e-4] * 60],  # tiny, and still below half of the first one
        [0.5, -0.3, 0.4, *[20.0] * 60],  # of either sign, as a policy gradient
        [5.0, 2.0, *[-30.0] * 60],  # a likelihood of continuous data
    ],
)
def test_losses_that_are_not_far(losses: list[float]) -> None:
    assert _far(losses) == 0


def test_a_noisy_loss_is_not_far_as_long_as_half_of_it_is_near() -> None:
    draw = random.Random(0)
    assert _far([1.0] + [draw.choice([0.5, 0.9, 20.0]) for _ in range(400)]) < 24


def test_a_loss_that_runs_away_below_zero_is_far() -> None:
    assert _far([-1.4, -1.5, *[-20.0 - step for step in range(50)]]) == 50


def _memory(**values: Any) -> Any:
    memory = SimpleNamespace(is_lost=False, has_left=False, is_far=False, lost_updates=0, forgotten=0)
    memory.forget_far = lambda: setattr(memory, "forgotten", memory.forgotten + 1)
    vars(memory).update(values)
    return memory


def test_each_question_is_asked_once() -> None:
    memory, asked = _memory(is_far=True), []
    question = GrowthQuestion(memory)
    for _ in range(3):
        assert question.answer(lambda: asked.append("far")) is None
    memory.is_lost = True
    for _ in range(3):
        assert question.answer(lambda: asked.append("lost")) is None
    assert asked == ["far", "lost"]
    assert memory.forgotten == 1


def test_an_early_answer_is_told_if_the_run_ends_so_or_the_loss_stays_far() -> None:
    finding: Any = SimpleNamespace(diagnosis="the rate", is_tentative=False)
    memory, asked = _memory(has_left=True), []
    question = GrowthQuestion(memory)
    for _ in range(3):
        assert question.answer(lambda: asked.append("early") or finding) is None
    early = question.last_word()
    assert early is not None
    assert early.diagnosis == "the rate"
    memory.has_left = False
    assert question.last_word() is None
    memory.has_left = memory.is_far = True
    assert question.answer(lambda: asked.append("far")) is early  # type: ignore[arg-type,return-value]
    assert asked == ["early"]


def test_an_early_answer_that_is_tentative_is_not_told_at_the_end() -> None:
    question = GrowthQuestion(_memory(has_left=True))
    finding: Any = SimpleNamespace(diagnosis="the rate", is_tentative=True)
    question.answer(lambda: finding)
    assert question.last_word() is None


def test_a_tentative_answer_waits_for_a_recovery() -> None:
    finding = SimpleNamespace(is_tentative=True)
    memory = _memory(is_lost=True, lost_updates=6)
    question = GrowthQuestion(memory)
    assert question.answer(lambda: finding) is None  # type: ignore[arg-type,return-value]
    memory.lost_updates = 24
    assert question.answer(lambda: None) is finding
    memory.lost_updates = 0
    assert question.answer(lambda: None) is None
    memory.lost_updates = 30
    assert question.answer(lambda: None) is None


def test_a_loss_that_the_first_updates_raise_and_that_stays_above_the_first_is_stuck() -> None:
    stuck, recovered, plain = (LossTrend(2.0) for _ in range(3))
    for loss in [9.0] * 20 + [2.5] * 20:
        stuck.note(loss)
    for loss in [9.0] * 20 + [1.5] * 20:
        recovered.note(loss)
    for loss in [2.5] * 40:
        plain.note(loss)
    assert stuck.stuck > 30
    assert recovered.stuck == plain.stuck == 0


def test_a_loss_that_is_where_it_was_is_still() -> None:
    still, fallen = LossTrend(2.0), LossTrend(2.0)
    for step in range(60):
        still.note(1.99)
        fallen.note(2.0 if step < 8 else 1.5)
    assert still.is_still
    assert not fallen.is_still
