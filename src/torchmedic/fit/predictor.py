"""The prediction for a script: its need, the largest batch, and the plans."""

from __future__ import annotations

from pathlib import Path

from torchmedic.errors import TorchmedicError
from torchmedic.fit import batches, plans
from torchmedic.fit.analysis import prediction_of
from torchmedic.fit.cards import chosen_card
from torchmedic.fit.changes import Change
from torchmedic.fit.trials import Trials
from torchmedic.records.fit import Prediction, Request


def predicted(request: Request, script: Path) -> Prediction:
    """Run the script on a pretended card.

    Raises:
        TorchmedicError: The script could not be followed; the text says why.
    """
    card, limited = chosen_card(request.card, request.memory)
    trials = Trials(script, request.arguments, card, request.seconds)
    trace = trials.run(Change())
    if trace.error:
        raise TorchmedicError(f"cannot follow {request.script}: {trace.error}")
    if not limited or not request.plans:
        return prediction_of(trace, card, limited=limited)
    sizes = batches.BatchSizes(trials, trace)
    batch = batches.largest(sizes, card)
    found = plans.fastest(trials, trace, sizes, card)
    return prediction_of(trace, card, limited=limited, batch=batch, plans=found)
