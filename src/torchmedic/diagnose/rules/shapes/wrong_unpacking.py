"""A batch or a tensor was unpacked into a wrong number of names.

What: `x, y = batch` needs as many names as the dataset returns parts. A tensor is unpacked along its first dimension:
if a layer returns one tensor, `out, hidden = layer(x)` splits its rows.

Why: a dataset that returns only inputs, or more than input and label; a layer that returns one tensor where a pair was
expected. Or the number fits, and the order does not: `accelerator.prepare(model, optimizer, loader)` gives its objects
back in the order of its arguments.

Cure: use as many names as there are parts, in their order, and `(x,)` for a single part.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame, node_location
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.lookup.origins import origin_of
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import user_trees

_NAMES = ast.Name | ast.Attribute
_OF_TRAINING = (torch.nn.Module, torch.optim.Optimizer, DataLoader)


@rule("TM169", "wrong-unpacking")
def check(evidence: RaisedEvidence) -> Draft | None:
    frame = evidence.frames[-1] if evidence.frames else None
    if frame is not None and frame.is_user and evidence.kinds & {"TypeError", "AttributeError"}:
        return _swapped(evidence, frame)
    if frame is None or "ValueError" not in evidence.kinds or not evidence.says("values to unpack"):
        return None
    if not isinstance(frame.node, ast.Tuple | ast.List) or not frame.is_user:
        return None
    names = len(frame.node.elts)
    statement = frame.statement
    if isinstance(statement, ast.For | ast.AsyncFor) and any(node is frame.node for node in ast.walk(statement.target)):
        parts = len(evidence.incident.batch)
        if _over_loader(frame, statement.iter) and parts and parts != names:
            return _batch(evidence, parts, names, "")
        return None
    if not isinstance(statement, ast.Assign):
        return None
    value = read(statement.value, frame)
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] != names:
        return _tensor(evidence, value, names)
    if isinstance(value, list | tuple) and len(value) != names and _is_batch(evidence, value):
        return _batch(evidence, len(value), names, ast.unparse(statement.value))
    return None


def _swapped(evidence: RaisedEvidence, frame: Frame) -> Draft | None:
    """Objects that a function gives back in order, under each other's names: `a, c, b = prepare(a, b, c)`."""
    used = {ast.unparse(node) for node in nodes_in(frame.node or frame.statement) if isinstance(node, _NAMES)}
    for file, tree in user_trees():
        for node in nodes_in(tree):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Call(args=args, keywords=[])):
                    names, given = [ast.unparse(each) for each in targets], [ast.unparse(each) for each in args]
                case _:
                    continue
            moved = [name for name, other in zip(names, given, strict=False) if name != other]
            if sorted(names) != sorted(given) or used.isdisjoint(moved) or not _are_of_training(frame, moved):
                continue
            name = next(each for each in moved if each in used)
            draft = check.draft(evidence, "likely", cause=f"given were `{', '.join(given)}`, in this order")
            draft.message = f"`{name}` is not what its name says: the objects came back in another order"
            draft.at(node_location("cause", file, node, "the names stand in another order than the arguments"))
            draft.at(*evidence.at_user_line("surfaced", evidence.message))
            return draft.help(f"name them in the order of the arguments: `{', '.join(given)} = ...`")
    return None


def _are_of_training(frame: Frame, names: list[str]) -> bool:
    """Whether one of the variables holds a model, an optimizer or a loader, which nobody puts under another name."""
    space = {**frame.live.f_globals, **frame.variables}
    return any(isinstance(space.get(name), _OF_TRAINING) for name in names)


def _over_loader(frame: Frame, iterated: ast.expr) -> bool:
    """Whether a loop goes over a DataLoader, bare or inside `enumerate`, `zip` or a progress bar."""
    for node in ast.walk(iterated):
        if isinstance(node, ast.Name | ast.Attribute):
            value = read(node, frame)
            if isinstance(value, DataLoader) or (isinstance(value, type) and issubclass(value, DataLoader)):
                return True
    return False


def _is_batch(evidence: RaisedEvidence, value: Any) -> bool:
    """Whether this is what the loader yielded, or at least made of nothing but tensors."""
    tensors = [item for item in value if isinstance(item, torch.Tensor)]
    return bool(tensors) and (len(tensors) == len(value) or any(item is tensors[0] for item in evidence.incident.batch))


def _batch(evidence: RaisedEvidence, parts: int, names: int, text: str) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"a batch of {count(parts, 'part')} was taken apart into {count(names, 'name')}"
    draft.cause = f"the parts are {', '.join(shape(tensor) for tensor in evidence.incident.batch) or parts}"
    draft.at(*evidence.at_user_line("cause", f"{parts} there, {names} named"))
    frame = evidence.user_frame
    node = frame.statement.value if frame is not None and isinstance(frame.statement, ast.Assign) else None
    made = origin_of(evidence.frames, frame, node) if frame is not None and isinstance(node, ast.Name) else None
    draft.mark(made, "origin", f"`{text}` comes from here")
    return draft.help("name as many parts as the dataset returns" + ("; a single one is `(x,)`" if parts == 1 else ""))


def _tensor(evidence: RaisedEvidence, value: torch.Tensor, names: int) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"a tensor of {shape(value)} was taken apart into {count(names, 'name')}"
    draft.cause = f"a tensor is taken apart along dimension 0, which has {value.shape[0]}"
    draft.at(*evidence.at_user_line("cause", f"one tensor of {shape(value)}, not {names} values"))
    return draft.help("give it one name; a layer that returns one tensor has no second value")
