"""The process that predicts: takes a request from stdin, answers with a prediction on stdout."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import msgspec

from torchmedic.errors import TorchmedicError
from torchmedic.fit.cards import chosen_card
from torchmedic.records.fit import Answer, Prediction, Request


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    output = os.dup(1)
    os.dup2(2, 1)  # nothing but the answer goes to stdout
    answer = _answered(request)
    with os.fdopen(output, "wb") as stream:
        stream.write(msgspec.json.encode(answer))


def _answered(request: Request) -> Answer:
    try:
        import torch  # noqa: F401
    except ImportError:
        return Answer(error="torch is not installed in this environment")
    warnings.simplefilter("ignore")
    os.chdir(request.folder)
    try:
        return Answer(prediction=_predicted(request, Path(request.script)))
    except TorchmedicError as error:
        return Answer(error=str(error))


def _predicted(request: Request, script: Path) -> Prediction:
    """Run the script on a pretended card: its need, the largest batch, and the plans.

    Raises:
        TorchmedicError: The script could not be followed; the text says why.
    """
    from torchmedic.fit import batches, plans
    from torchmedic.fit.analysis import prediction_of
    from torchmedic.fit.changes import Change
    from torchmedic.fit.trials import Trials

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


if __name__ == "__main__":
    main()
