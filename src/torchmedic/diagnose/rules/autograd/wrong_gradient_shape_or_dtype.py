"""A gradient has a different shape from the tensor that it belongs to.

What: the gradient of a tensor has the shape of that tensor. torch itself sums over dimensions that were broadcast, but
corrects nothing else.

Why: the `backward` of a custom Function lacks a transpose, a reshape or a sum; or the data of a weight was replaced
with data of another shape between the forward pass and backward.

Cure: return a gradient with the shape of the input, and change the shape of a weight only between steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten
from torchmedic.diagnose.cures.graph_trials import GraphTrials
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.backward_failure import BackwardFailure
from torchmedic.evidence.custom_functions import (
    arguments_of,
    function_named,
    method_node,
    return_node,
    returns_in_replay,
)
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.replay.trace.provenance import Provenance
from torchmedic.source.live_frames import node_location
from torchmedic.source.spots import spot_of_node

_MESSAGE = re.compile(
    r"Function (\w+) returned an invalid gradient at index (\d+) - "
    r"(?:got \[([\d, ]*)\] but expected shape compatible with \[([\d, ]*)\]|(.*))",
    re.S,
)


@rule("TM111", "wrong-gradient-shape-or-dtype")
def check(evidence: RaisedEvidence) -> Draft | None:
    found = _MESSAGE.search(evidence.message)
    if found is None or "RuntimeError" not in evidence.kinds:
        return None
    failure = BackwardFailure(evidence)
    kind = function_named(failure, found[1])
    if kind is None:
        return _of_torch(evidence, failure, found)
    index = int(found[2])
    names = arguments_of(kind)
    name = f"`{names[index]}`" if index < len(names) else f"input {index}"
    seen = [one for one in returns_in_replay(failure, [kind]) if one.kind is kind]
    node = return_node(kind, seen[-1].line if seen else None)
    shapes = f"[{found[3]}] where {name} is [{found[4]}]" if found[4] is not None else found[5].strip()
    draft = check.draft(evidence, "proven" if seen else "likely")
    draft.message = (
        f"the backward of `{kind.__name__}` returned a gradient of shape {shapes}"
        if found[4] is not None
        else f"the backward of `{kind.__name__}` returned a gradient that does not fit {name}: {shapes}"
    )
    draft.cause = f"gradient {index + 1} of the result belongs to {name} and must have its shape, dtype and device"
    if node is not None:
        draft.at(node_location("cause", node[0], _item(node[1], index) or node[1], f"the gradient of {name}"))
        draft.at(_computed(kind, *node, index))
    draft.mark(failure.caller, "surfaced", "noticed here")
    treated = None
    if node is not None and isinstance(node[1], ast.Return) and found[4] is not None:
        got, wanted = _sizes(found[3]), _sizes(found[4])
        treated = GraphTrials(failure).first(_candidates(node[0], node[1], index, got, wanted))
    return draft.treat(treated, otherwise=f"return a gradient of the shape, dtype and device of {name}")


def _sizes(text: str) -> list[int]:
    return [int(size) for size in re.findall(r"\d+", text)]


def _item(node: ast.AST, index: int) -> ast.expr | None:
    value = node.value if isinstance(node, ast.Return) else None
    if isinstance(value, ast.Tuple) and index < len(value.elts):
        return value.elts[index]
    return value if index == 0 else None


def _computed(kind: type, file: str, node: ast.AST, index: int) -> Location | None:
    """The assignment that made the returned gradient, where it is a variable with one."""
    item = _item(node, index)
    function = method_node(kind, "backward", "vjp")
    if not isinstance(item, ast.Name) or function is None:
        return None
    made = [
        part
        for part in ast.walk(function[1])
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == item.id
    ]
    return node_location("origin", file, made[0], "computed here") if len(made) == 1 else None


def _candidates(file: str, node: ast.Return, index: int, got: list[int], wanted: list[int]) -> Iterator[Candidate]:
    """Unambiguous changes only: transpose a matrix, add or drop dimensions of size one."""
    item = _item(node, index)
    if item is None:
        return
    text = called(rewritten(file, item), item)
    spot = spot_of_node(file, item)
    if len(got) == 2 and got == wanted[::-1]:
        yield "transpose the gradient", Edit(spot, f"{text}.t()")
    elif [size for size in got if size != 1] == [size for size in wanted if size != 1]:
        yield "give the gradient the shape of its input", Edit(spot, f"{text}.reshape({wanted})")


def _of_torch(evidence: RaisedEvidence, failure: BackwardFailure, found: re.Match[str]) -> Draft:
    """An operation of torch's own: a tensor got other data between the forward pass and backward."""
    name = re.sub(r"Backward\d*$", "", found[1])
    draft = check.draft(evidence, "likely")
    draft.message = f"the gradient of `{name}` does not have the shape of the tensor that it belongs to"
    draft.cause = "a tensor that the forward pass used was given data of another shape before backward"
    swapped = _swapped(failure)
    if swapped is not None:
        draft.at(swapped.location("cause", "the tensor is given other data here"))
        draft.mark(failure.caller, "surfaced", "noticed here")
    else:
        draft.mark(failure.caller, "cause", "noticed here")
    draft.because(evidence.message[:300])
    return draft.help("change the shape of a weight only after backward, and make a new optimizer for it")


def _swapped(failure: BackwardFailure) -> Spot | None:
    step = failure.replay()
    if step is None:
        return None
    provenance = Provenance()
    step.runner.play(provenance)
    setting = [call.spot for call in provenance.calls if call.sets_data and call.spot is not None]
    return setting[-1] if setting else None
