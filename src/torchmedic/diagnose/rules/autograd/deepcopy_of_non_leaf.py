"""`copy.deepcopy` reached a tensor that is part of an autograd graph.

What: a tensor that was computed from others refers to its graph, and a graph cannot be copied. Only leaves can be
deep-copied.

Why: a model keeps an activation or a loss as an attribute, or a list or dictionary contains one, and the whole object
is copied: for the best checkpoint, an averaged model, a worker.

Cure: keep `x.detach()` in the attribute, or copy `model.state_dict()` instead.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.syntax import nodes_in


@rule("TM124", "deepcopy-of-non-leaf")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("graph leaves", "deepcopy protocol"):
        return None
    tensor = next(
        (frame.variables.get("self") for frame in reversed(evidence.frames) if frame.function == "__deepcopy__"), None
    )
    owner, attribute = _attribute(evidence)
    key, entry = ("", None) if attribute else _entry(evidence)
    name = f"`{type(owner).__name__}.{attribute}`" if attribute else f"the entry {key!r}" if key else "a tensor"
    draft = check.draft(evidence, "proven" if isinstance(tensor, torch.Tensor) and not tensor.is_leaf else "likely")
    draft.message = f"{name} still carries its history and cannot be copied"
    draft.cause = "a tensor that was computed from others hangs on a graph, which cannot be copied"
    place = _kept(owner, attribute) or entry
    draft.at(place, *evidence.at_user_line("surfaced" if place is not None else "cause", "copied here"))
    if isinstance(tensor, torch.Tensor):
        draft.because(f"it has shape {shape(tensor)} and was made by `{type(tensor.grad_fn).__name__}`")
    if attribute:
        draft.help(
            f"keep it without its history: put `.detach()` of it into `self.{attribute}`, or copy the `state_dict()` "
            "instead"
        )
    else:
        draft.help(f"put `.detach()` of it into the dict as {key!r}" if key else "copy `x.detach().clone()` instead")
    return draft


def _attribute(evidence: RaisedEvidence) -> tuple[Any, str]:
    """The object of the user's and its attribute that `deepcopy` was at, from its own frames."""
    owner: Any = None
    for frame in evidence.frames:
        if frame.function == "deepcopy":
            value = frame.variables.get("x")
            if not isinstance(value, dict | list | tuple | torch.Tensor):
                owner = value
    for frame in reversed(evidence.frames):
        key = frame.variables.get("key")
        if frame.function == "_deepcopy_dict" and isinstance(key, str) and owner is not None and key in vars(owner):
            return owner, key
    return None, ""


def _entry(evidence: RaisedEvidence) -> tuple[str, Location | None]:
    """The key of the dict that `deepcopy` was at, and the value that a call of the user's gave it."""
    frames = [frame for frame in evidence.frames if frame.function == "_deepcopy_dict"]
    key = frames[-1].variables.get("key") if frames else None
    if not isinstance(key, str):
        return "", None
    for frame in reversed(evidence.frames):
        for node in nodes_in(frame.node) if frame.is_user else ():
            for name, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                if isinstance(name, ast.Constant) and name.value == key:
                    return key, node_location("cause", frame.file, value, "put in with its history here")
    return key, None


def _kept(owner: Any, attribute: str) -> Location | None:
    """The only statement that gives the attribute a value other than None."""
    if not attribute:
        return None
    made = [
        (file, node)
        for file, node in attribute_assignments(type(owner), attribute)
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    return node_location("cause", *made[0], "kept with its history here") if len(made) == 1 else None
