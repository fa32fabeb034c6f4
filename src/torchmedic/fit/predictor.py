"""The prediction for a script: its need, the largest batch, and the plans."""

from __future__ import annotations

from pathlib import Path

from torchmedic.errors import TorchmedicError
from torchmedic.fit import batches, plans
from torchmedic.fit.analysis import need_of, peak_of
from torchmedic.fit.cards import DEFAULT, Card, card_with, find_card
from torchmedic.fit.changes import Change
from torchmedic.fit.trials import Trials
from torchmedic.records.fit import Batch, Plan, Prediction, Request

_UNLIMITED = 1 << 60


def predicted(request: Request, script: Path) -> Prediction:
    """Run the script on a pretended card.

    Raises:
        TorchmedicError: The script could not be followed; the text says why.
    """
    card, limited = _card(request)
    trials = Trials(script, request.arguments, card, request.seconds)
    trace = trials.run(Change())
    if trace.error:
        raise TorchmedicError(f"cannot follow {request.script}: {trace.error}")
    need = need_of(trace, card)
    peak = peak_of(trace, need)
    batch = Batch()
    found: tuple[Plan, ...] = ()
    if limited and request.plans:
        sizes = batches.BatchSizes(trials, trace)
        batch = batches.largest(sizes, card)
        found = plans.fastest(trials, trace, sizes, card)
    return Prediction(
        card=card.name if limited else "",
        memory=card.memory if limited else None,
        need=need,
        phase=peak.phase,
        line=peak.line,
        rows=peak.rows,
        seconds=trace.seconds,
        batch=batch,
        plans=found,
        notes=tuple(trace.notes),
    )


def _card(request: Request) -> tuple[Card, bool]:
    if request.card:
        card = find_card(request.card)
        return (card._replace(memory=request.memory) if request.memory is not None else card), True
    if request.memory is not None:
        return card_with(request.memory), True
    return DEFAULT._replace(memory=_UNLIMITED), False
