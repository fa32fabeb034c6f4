"""The `backward` of a custom Function did not return one gradient for every input of its `forward`.

What: `backward` must return as many values as `forward` has arguments besides `ctx`, in the same order. An argument
that has no gradient, such as a number or a flag, gets `None`.

Why: an argument was added to `forward` but not to the `return` of `backward`, or `backward` has no `return` at all.

Cure: return one value per argument, and `None` for arguments that are not differentiated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.diagnose.cures.edits import Candidate, rewritten
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.custom_functions import (
    Returned,
    arguments_of,
    function_named,
    gradients,
    head_location,
    method_node,
    return_node,
    returned_location,
    returns_in_replay,
)
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.trial import Edit
from torchmedic.source.spots import spot_of_node

_MESSAGE = re.compile(r"function (\w+) returned an incorrect number of gradients \(expected (\d+), got (\d+)\)")


@rule("TM110", "wrong-number-of-gradients")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _MESSAGE.search(evidence.message)
    if found is None or "RuntimeError" not in evidence.kinds:
        return None
    failure = BackwardFailure(evidence)
    expected, got = int(found[2]), int(found[3])
    kind = function_named(failure, found[1])
    if kind is None:
        return _unknown(evidence, failure, found[1], expected, got)
    seen = [one for one in returns_in_replay(failure, [kind]) if one.kind is kind]
    last = seen[-1] if seen and len(gradients(seen[-1].value)) == got else None
    node = return_node(kind, last.line if last is not None else None)
    names = arguments_of(kind)
    listed = ", ".join(f"`{name}`" for name in names)
    draft = check.draft(evidence, "proven" if last is not None else "likely")
    draft.message = (
        f"the backward of `{kind.__name__}` returned {count(got, 'gradient')} where its forward has "
        f"{count(expected, 'input')}"
    )
    draft.cause = f"one gradient is needed per argument of `{kind.__name__}.apply`" + (f": {listed}" if names else "")
    if node is not None:
        label = f"{got} of {expected} gradients" if isinstance(node[1], ast.Return) else "it returns nothing"
        draft.at(returned_location(node, label))
    forward = method_node(kind, "forward")
    if forward is not None:
        draft.at(head_location("origin", *forward, f"{expected} inputs"))
    draft.mark(failure.caller, "surfaced", "noticed here")
    treated = None
    if node is not None and last is not None and isinstance(node[1], ast.Return):
        treated = GraphTrials(failure).first(_candidates(node[0], node[1], last, expected))
    return draft.treat(
        treated,
        otherwise=f"return {expected} values in the order of the arguments, `None` for those without a gradient",
    )


def _candidates(file: str, node: ast.Return, last: Returned, expected: int) -> Iterator[Candidate]:
    """The given gradients in the places of the inputs that need one, `None` elsewhere."""
    value = node.value
    assert value is not None
    literal = isinstance(value, ast.Tuple)
    items = [rewritten(file, part) for part in value.elts] if isinstance(value, ast.Tuple) else [rewritten(file, value)]
    given = gradients(last.value)
    spot = spot_of_node(file, node)
    if not literal and isinstance(last.value, tuple | list):
        items = [f"*{items[0]}"]
    wanted = [position for position, needed in enumerate(last.needs) if needed]
    real = [item for item, gradient in zip(items, given, strict=False) if gradient is not None]
    if len(items) == len(given) and len(real) == len(wanted) and len(last.needs) == expected:
        placed = ["None"] * expected
        for position, item in zip(wanted, real, strict=True):
            placed[position] = item
        yield "return `None` for the inputs without a gradient", Edit(spot, f"return {', '.join(placed)}")
    missing = expected - len(given)
    if missing > 0 and not any(last.needs[len(given) :]):
        text = ", ".join([*items, *["None"] * missing])
        yield "return `None` for the inputs without a gradient", Edit(spot, f"return {text}")
    elif missing < 0 and literal:
        text = ", ".join(items[:expected])
        yield "return only as many gradients as there are inputs", Edit(spot, f"return {text}")


def _unknown(evidence: RaisedEvidence, failure: BackwardFailure, name: str, expected: int, got: int) -> Draft:
    kind = name.removesuffix("Backward")
    draft = check.draft(evidence, "likely")
    got_text, wanted = count(got, "gradient"), count(expected, "input")
    draft.message = f"the backward of `{kind}` returned {got_text} where its forward has {wanted}"
    draft.cause = "one gradient is needed per argument of the forward"
    draft.mark(failure.caller, "cause", "noticed here")
    return draft.help(f"return {expected} values in the order of the arguments, `None` for those without a gradient")
