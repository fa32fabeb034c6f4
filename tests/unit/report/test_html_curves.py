"""The curves of the training: which there are, what is kept of them, and on which scale they are drawn."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from runs import diagnosis, points, whole

from torchmedic.report.html import charts, page
from torchmedic.report.html.charts import scale_of
from torchmedic.report.html.run_data import CurveLine, Process
from torchmedic.report.html.series import MAX_POINTS
from torchmedic.report.html.training_curves import constant_rate, training_curves


def process(*lines: CurveLine) -> Process:
    return Process(name="rank0", curves=lines)


def line(*points: tuple[float | None, ...], places: tuple[str, ...] = ("/w/train.py:3",)) -> CurveLine:
    return CurveLine(time=1.0, places=places, points=points)


def test_loss_norm_and_rate_are_curves_with_the_failure_marked() -> None:
    found = [diagnosis("TM201", step=12), diagnosis("TM601", severity="note", step=3)]
    loss, norm, rate = training_curves(process(line(*points(0, 300))), found, ())
    assert [each.title for each in (loss, norm, rate)] == ["Loss", "Gradient norm at the update", "Learning rate"]
    assert loss.x == tuple(range(300))
    assert loss.lines[0].values[100] == pytest.approx(1.9)
    assert norm.x == tuple(range(0, 300, 2))
    assert [(mark.x, mark.text) for mark in loss.marks] == [(12.0, "TM201, step 12")]


def test_a_rate_that_never_changes_is_a_fact_and_no_curve() -> None:
    same = process(line(*[(step, 1.0 + step, 0.25, None, 0) for step in range(20)]))
    assert [curve.title for curve in training_curves(same, (), ())] == ["Loss"]
    assert constant_rate(same) == 0.25
    assert constant_rate(process(line(*points(0, 300)))) is None


def test_the_losses_of_two_lines_are_two_curves() -> None:
    both = line(
        *[(step, float(10 * number + step), 0.1, None, number) for step in range(50) for number in (0, 1)],
        places=("/w/gan.py:7", "/w/gan.py:12"),
    )
    (curve,) = training_curves(process(both), (), ("gan.py",))
    assert [each.name for each in curve.lines] == ["loss, gan.py:7", "loss, gan.py:12"]
    assert curve.lines[1].values[:3] == (10.0, 11.0, 12.0)


def test_many_points_are_thinned_and_a_spike_stays() -> None:
    values = [(step, 500.0 if step == 7777 else 1.0, 0.1, None, 0) for step in range(20_000)]
    (curve,) = training_curves(process(line(*values)), (), ())
    assert len(curve.x) <= MAX_POINTS
    assert max(value for value in curve.lines[0].values if value is not None) == 500.0
    assert curve.scale == "log"


@pytest.mark.parametrize("kind", ["zero", "fit", "log"])
@pytest.mark.parametrize("values", [[1.0, 1.0], [0.001, 3e9], [2.31, 2.34], [5.0]])
def test_a_scale_holds_its_values_and_has_few_labels(kind: str, values: list[float]) -> None:
    scale = scale_of(values, kind)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in [*values, *scale.ticks])
    assert 1 <= len(scale.ticks) <= 7


def test_hostile_points_are_no_error() -> None:
    odd = line((None, 1.0), (5,) * 5, (6, -1.0, None, None, 99), (7, 0.0, 1e300, -5.0, None), places=())
    for curve in training_curves(process(odd), (), ()):
        charts.curve_plot(curve)


def test_the_way_of_a_bad_number_and_failed_trials_are_on_the_page() -> None:
    text = page.render(whole()).decode()
    for part in ("born here", "4 operations left out", "the loss", "no success", "inputs: up to 1, not finite"):
        assert part in text
    hidden = page.render(replace(whole(), confidential=True)).decode()
    for part in ("born here", "no success", "gradient norm"):
        assert part not in hidden
