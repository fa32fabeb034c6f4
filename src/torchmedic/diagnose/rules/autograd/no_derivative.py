"""Backward reached an operation for which torch has no derivative.

What: torch has a derivative for nearly every operation, but not for all of them, and for some operations only with
respect to some inputs. The forward pass runs; backward fails there.

Why: a special function (`igamma` in its first argument, for example), an operation with integer or complex inputs, or
a second derivative of an operation that has only a first one.

Cure: compute the same value with operations that have a derivative, write a custom Function, or detach the input if it
should not be trained.
"""

from __future__ import annotations

import re

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.trace.provenance import FunctionCall, Provenance

_MESSAGE = re.compile(r"the derivative for ['\"]?([\w:. ]+?)['\"]? is not implemented", re.I)


@rule("TM116", "no-derivative")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _MESSAGE.search(evidence.message)
    if found is None or not evidence.kinds & {"RuntimeError", "NotImplementedError"}:
        return None
    operation, _, argument = (part.strip() for part in found[1].removeprefix("aten::").partition(":"))
    failure = BackwardFailure(evidence)
    call = _forward(failure, operation) if failure.engine is not None else None
    of = f" with respect to `{argument}`" if argument else ""
    draft = check.draft(evidence, "proven" if call is not None else "likely")
    draft.message = f"`{operation}` has no derivative{of}"
    draft.cause = f"backward needs the derivative of `{operation}`{of}, and torch does not have it"
    if call is not None and call.spot is not None:
        draft.at(call.spot.location("cause", f"`{operation}` is applied to a tensor that requires a gradient"))
        draft.mark(failure.caller, "surfaced", "backward fails here")
    else:
        draft.at(*evidence.at_user_line("cause", "backward fails here" if failure.engine is not None else ""))
    return draft.help(
        f"write `{operation}` with operations that have a derivative, or detach the input if it is not trained"
    )


def _forward(failure: BackwardFailure, operation: str) -> FunctionCall | None:
    """The call of the forward pass whose node torch could not go through."""
    step = failure.replay()
    if step is None:
        return None
    provenance = Provenance()
    played = step.runner.play(provenance)
    if played.error is None or operation not in str(played.error) or not played.roots:
        return None
    wanted = operation.replace("_", "").lower()
    for call in provenance.behind(played.roots[-1]):
        nodes = {type(tensor.grad_fn).__name__.lower() for tensor in call.outputs if tensor.grad_fn is not None}
        named = call.name in (operation, f"special_{operation}") or any(name.startswith(wanted) for name in nodes)
        if call.spot is not None and (named or nodes == {"notimplemented"}):
            return call
    return None
