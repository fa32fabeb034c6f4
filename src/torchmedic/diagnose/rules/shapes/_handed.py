"""What a function of the user's returned to a library that wants the loss of it."""

from __future__ import annotations

import ast
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.handed_loss import Handing, handing_function
from torchmedic.source.syntax import makes_number, nodes_in

_MISSING = object()
_NAMES = ("training_step_output", "loss")  # of a variable of a library
_KINDS = frozenset({"TypeError", "AttributeError", "MisconfigurationException", "ValueError"})


def describe(draft: Draft, evidence: RaisedEvidence) -> Draft | None:
    """A library raises because what a function of the user's returned is no loss; None where that is not so."""
    value = _handed(evidence) if evidence.kinds & _KINDS and evidence.is_in_library else _MISSING
    handing = handing_function(evidence.frames) if value is not _MISSING else None
    if handing is None or (isinstance(value, dict) and value.get("loss") is not None):
        return None
    name = f"`{handing.function.name}`"
    draft.message = f"{name} returned {_described(value)}, and the library wants the loss"
    draft.cause = f"a library calls backward on what {name} returns, and there is nothing to call it on"
    last: ast.stmt = handing.returns[-1] if handing.returns and value is not None else handing.function.body[-1]
    made = _number_made(handing, last) if isinstance(value, float | int) else None
    draft.at(node_location("cause", handing.file, made or last, _label(value, made or last)))
    draft.at(*evidence.at_user_line("surfaced", "the library was started here"))
    if isinstance(value, dict):
        return draft.help("put the loss into the dict, under the key `loss`")
    return draft.help("return the loss as a tensor, on every way through the function")


def _handed(evidence: RaisedEvidence) -> Any:
    """What the statement that raised took for the loss, if it is no tensor."""
    last = evidence.frames[-1]
    used = {node.id for node in nodes_in(last.statement) if isinstance(node, ast.Name)}
    for name in _NAMES:
        value = last.variables.get(name, _MISSING)
        is_named = name in used or (last.instruction == "RAISE_VARARGS" and evidence.says("training_step"))
        if value is not _MISSING and is_named and not isinstance(value, torch.Tensor):
            return value
    outputs, inputs = last.variables.get("outputs"), last.variables.get("inputs")
    if (
        evidence.says("did not return a loss")
        and isinstance(outputs, dict)
        and any("label" in key for key in inputs or ())
    ):
        return dict(outputs)  # without labels, there can be no loss: another rule tells that
    return _MISSING


def _number_made(handing: Handing, last: ast.stmt) -> ast.stmt | None:
    """The statement that makes a number of the loss which is returned: `loss = loss.item()`."""
    names = {node.id for node in ast.walk(last) if isinstance(node, ast.Name)}
    made = [
        node
        for node in nodes_in(handing.function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and makes_number(node.value)
        if any(isinstance(each, ast.Name) and each.id in names for each in node.targets)
    ]
    return made[0] if len(made) == 1 else None


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"a dict without `loss` ({', '.join(map(str, list(value)[:5]))})"
    return f"a {type(value).__name__} and no tensor"


def _label(value: Any, last: ast.stmt) -> str:
    if value is not None:
        return "returned from here" if isinstance(last, ast.Return) else "becomes a number here"
    return "no loss is returned on some way through here" if _holds_return(last) else "ends here and returns nothing"


def _holds_return(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(statement))
