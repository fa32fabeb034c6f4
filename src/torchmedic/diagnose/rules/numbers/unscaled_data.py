"""The inputs or targets are so large that an ordinary learning rate is too high.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the data standardised (mean 0, deviation 1) and nothing else changed, the loss fell. Or the loss fell without a number
that stands for a missing value, such as -999.

Or a value overflowed in one step, and did not with the data of this step standardised.

Or the loss stood still with targets of that size, and fell with standardised ones, in updates on the present batch.

Why: the slope of the loss grows with the square of the inputs. A column in the thousands needs a learning rate that is
a million times smaller than a column around 1. Adam and the like make updates of a fixed size whatever the slope is: an
output that begins near 0 takes ages to reach targets in the thousands.

Cure: standardise the data: subtract the mean of every column and divide by its deviation. Drop items with a missing
value, or leave them out of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.diagnose.rules.numbers._wording import noticed, victim
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.data_makers import made_at
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.step_data import Data, Placeholder, Sample, data_of
from torchmedic.records import Treatment
from torchmedic.replay.step.trial import describe, passes
from torchmedic.replay.trajectory.change import Change
from torchmedic.replay.trajectory.units import Unit

_NEAR = 0.01  # times the loss as it was: the loss is as large as the targets are
_FALLEN = 0.97  # times the first loss: the updates move the loss


@rule("TM234", "unscaled-data")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is not None and evidence.incident.quantity == "standstill":
        return _of_standstill(evidence, divergence)
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    known = data_of(divergence.trajectory.units)
    holding = [(data, placeholder) for data in known if (placeholder := data.placeholder) is not None]
    for held in [*([each] for each in holding), *([holding] if len(holding) > 1 else [])]:
        paths = ", ".join(f"{data.path} without {placeholder.value}" for data, placeholder in held)
        change = Change(paths, data=_all(data.without(placeholder) for data, placeholder in held))
        if divergence.turns_alone(change):
            return _of_placeholders(evidence, divergence, held, change)
    unscaled = [data for data in known if data.is_unscaled]
    alone = [[data] for data in unscaled]
    for group in [*alone, unscaled] if len(unscaled) > 1 else alone:
        paths = ", ".join(str(data.path) for data in group)
        change = Change(f"{paths} standardised", data=_all(data.standardised() for data in group))
        if not divergence.turns_alone(change):
            continue
        shown = listed(list(dict.fromkeys(data.shown for data in group)))
        ranges = "; ".join(data.widest.text for data in group)
        draft = begin(
            check,
            evidence,
            divergence,
            f"the data in {shown} is not scaled",
            f"{ranges}, which is too large for the learning rate",
        )
        for data in group:
            _locate(draft, evidence, data.samples[0], data.widest.text)
        title = f"standardise {shown}: subtract the mean of every column, divide by its deviation"
        draft.treat(cure(divergence, title, [("standardised", divergence.course(change))]))
        return finish(draft, evidence)
    return None


def _of_standstill(evidence: NumbersEvidence, divergence: Divergence) -> Draft | None:
    """Targets that are so far away that the updates of an optimizer with steps of a fixed size do not get there."""
    start = divergence.original.losses[0]
    for data in data_of(divergence.trajectory.units):
        change = Change(f"{data.path} standardised", data=data.standardised())
        course = divergence.course(change) if data.is_unscaled else None
        if course is None or not course.is_finite or not course.losses[0] < _NEAR * start:
            continue  # not the targets: of these the size of the loss comes
        if course.losses[-1] > _FALLEN * course.losses[0]:
            continue
        message = f"the data in {data.shown} is not scaled: the loss has hardly moved in {evidence.incident.step} steps"
        why = f"{data.widest.text}, and the updates are too small to reach such values"
        draft = check.draft(evidence, "likely", message, why)
        _locate(draft, evidence, data.samples[0], data.widest.text)
        title = f"standardise {data.shown}: subtract the mean of every column, divide by its deviation"
        draft.treat(cure(divergence, title, [("standardised", course)]))
        draft.mark(evidence.noticed, "surfaced", "noticed here")
        return draft
    return None


def of_step(evidence: NumbersEvidence) -> Draft | None:
    """Data that is so large that a value overflows in this step, and not with the data standardised."""
    if evidence.step is None or evidence.birth is None or evidence.birth.kind != "inf":
        return None
    runner = evidence.step.runner
    call = evidence.agent.kept_backwards.present(evidence.incident.step)
    for data in data_of([Unit(call, evidence.step, True, ())]):
        played = runner.play(change=data.standardised()) if data.is_unscaled else None
        if played is None or not passes(played):
            continue
        message = f"the data in {data.shown} is not scaled, and made {victim(evidence)}"
        draft = check.draft(evidence, "proven", message, f"{data.widest.text}, and a value that follows overflows")
        _locate(draft, evidence, data.samples[0], data.widest.text)
        draft.mark(evidence.spot, "surfaced", "this overflows")
        draft.treat(
            Treatment(
                title=f"standardise {data.shown}: subtract the mean of every column, divide by its deviation",
                safety="changes-training",
                proven=True,
                result=describe(played),
            )
        )
        return draft.because(noticed(evidence))
    return None


def _of_placeholders(
    evidence: NumbersEvidence, divergence: Divergence, holding: list[tuple[Data, Placeholder]], change: Change
) -> Draft:
    shown = listed([data.shown for data, _ in holding])
    values = listed(list(dict.fromkeys(f"{placeholder.value:g}" for _, placeholder in holding)))
    counts = "; ".join(placeholder.text for _, placeholder in holding)
    draft = begin(
        check,
        evidence,
        divergence,
        f"the data in {shown} holds {values} where a value is missing",
        f"{counts}, far beyond all others, and the model is fitted to this number",
    )
    for _, placeholder in holding:
        _locate(draft, evidence, placeholder.sample, placeholder.text, row=placeholder.row)
    title = f"drop the items with {values}, or leave them out of the loss"
    draft.treat(cure(divergence, title, [(f"without {values}", divergence.course(change))]))
    return finish(draft, evidence)


def _locate(draft: Draft, evidence: NumbersEvidence, sample: Sample, label: str, row: int | None = None) -> None:
    """The line that made the data, else the step that reads it."""
    draft.at(made_at(evidence.frames, sample.call, sample.tensor, label, row=row))
    if not draft.has_place:
        draft.at(evidence.noticed.location("cause", label) if evidence.noticed is not None else None)


def _all(given: Iterable[Callable[[dict[str, Any]], None]]) -> Callable[[dict[str, Any]], None]:
    """All of some changes of the data at once."""
    changes = list(given)

    def change(namespace: dict[str, Any]) -> None:
        for each in changes:
            each(namespace)

    return change
