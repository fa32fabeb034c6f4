"""The inputs or targets are so large that an ordinary learning rate is too high.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
the data standardised (mean 0, deviation 1) and nothing else changed, the loss fell.

Why: the slope of the loss grows with the square of the inputs. A column in the thousands needs a learning rate that is
a million times smaller than a column around 1.

Cure: standardise the data: subtract the mean of every column and divide by its deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.evidence.step_data import Data, data_of, made_at
from torchmedic.replay.trajectory.change import Change


@rule("TM234", "unscaled-data")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    unscaled = [data for data in data_of(divergence) if data.is_unscaled]
    alone = [[data] for data in unscaled]
    for group in [*alone, unscaled] if len(unscaled) > 1 else alone:
        paths = ", ".join(str(data.path) for data in group)
        change = Change(f"{paths} standardised", data=_standardised(group))
        if not divergence.turns_alone(change):
            continue
        shown = listed([data.shown for data in group])
        ranges = "; ".join(data.widest.text for data in group)
        draft = begin(
            check,
            evidence,
            divergence,
            f"the data in {shown} is not scaled",
            f"{ranges}, which is too large for the learning rate",
        )
        unit = divergence.trajectory.units[0]
        for data in group:
            draft.at(made_at(evidence, unit, data.tensor, data.widest.text))
        if not draft.has_place:  # what made the data is gone: the step that reads it is known
            draft.at(evidence.noticed.location("cause", ranges) if evidence.noticed is not None else None)
        title = f"standardise {shown}: subtract the mean of every column, divide by its deviation"
        draft.treat(cure(divergence, title, [("standardised", divergence.course(change))]))
        return finish(draft, evidence)
    return None


def _standardised(group: list[Data]) -> Callable[[dict[str, Any]], None]:
    """Changes all data of a group."""
    changes = [data.standardised() for data in group]

    def change(namespace: dict[str, Any]) -> None:
        for each in changes:
            each(namespace)

    return change
