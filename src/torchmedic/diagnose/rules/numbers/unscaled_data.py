"""The inputs or targets are so large that an ordinary learning rate is too high.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the data standardised (mean 0, deviation 1) and nothing else changed, the loss fell. Or the loss fell without a number
that stands for a missing value, such as -999.

Why: the slope of the loss grows with the square of the inputs. A column in the thousands needs a learning rate that is
a million times smaller than a column around 1.

Cure: standardise the data: subtract the mean of every column and divide by its deviation. Drop items with a missing
value, or leave them out of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.data_makers import made_at
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.step_data import Data, Placeholder, Sample, data_of
from torchmedic.replay.trajectory.change import Change


@rule("TM234", "unscaled-data")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    known = data_of(divergence)
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
