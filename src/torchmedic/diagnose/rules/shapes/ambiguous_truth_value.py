"""A tensor with several elements was used as a truth value.

What: `if`, `while`, `assert`, `and`, `not`, `in`, `max()` and `list.index()` need one truth value. A tensor has one
only if it has exactly one element.

Why: an elementwise comparison (`x > 0`), a loss that was not reduced, a search for a tensor in a list, or a loss class
that was given the prediction in its constructor, which takes options.

Cure: say which elements count: `.any()`, `.all()`, `.item()` after a reduction; construct the loss first, then call it.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import raising_call, read


@rule("TM157", "ambiguous-truth-value")
def check(evidence: RaisedEvidence) -> Draft | None:
    if "RuntimeError" not in evidence.kinds or not evidence.says("Boolean value of Tensor", "ambiguous"):
        return None
    loss = evidence.inside("__init__")
    if loss is not None and isinstance(loss.module, nn.modules.loss._Loss):
        return _unbuilt_loss(evidence, loss.module)
    tensor = _tested(evidence.frames[-1]) if evidence.frames else None
    many = "no elements" if evidence.says("no values") else "several elements"
    if tensor is None:
        draft = check.draft(
            evidence, "likely", f"a tensor with {many} was used as a truth value", "torch refused to choose"
        )
        draft.at(*evidence.at_user_line("cause", f"a tensor with {many}"))
    else:
        elements = count(tensor.numel(), "element")
        draft = check.draft(evidence, "proven")
        draft.message = f"a tensor with {elements} was used as a truth value"
        draft.cause = f"its shape is {shape(tensor)}; only a tensor with one element is true or false"
        draft.at(*evidence.at_user_line("cause", f"{shape(tensor)}: {elements}"))
        draft.at(made_here(evidence, tensor, f"becomes {shape(tensor)}"))
    user = evidence.user_frame
    call = raising_call(user) if user is not None else None
    if call is not None and call.op in ("max", "min") and call.function in (max, min):
        draft.help(f"`{call.op}imum` of torch compares element by element: `torch.{call.op}imum(a, b)`")
    elif call is not None and call.op in ("index_of", "remove", "count", "compare") and _is_search(user):
        draft.help("look for the very object: `any(item is x for item in items)`; `in` and `index` compare the values")
    else:
        draft.help(
            "say which elements count: `.any()` or `.all()`, or reduce to one number first (`.mean()`, `.sum()`)"
        )
    return draft


def _is_search(frame: Frame | None) -> bool:
    node = frame.node if frame is not None else None
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
    return isinstance(node, ast.Call)


def _tested(frame: Frame) -> torch.Tensor | None:
    """The tensor whose truth was asked for."""
    node: Any = frame.node
    statement = frame.statement
    if node is None and isinstance(statement, ast.If | ast.While | ast.Assert):
        node = statement.test
    if node is None:
        return None
    # `a and b`, `x if test else y`: only a part of the expression is tested, the first that is a tensor of several.
    parts: list[ast.expr] = [node]
    if isinstance(node, ast.BoolOp):
        parts = node.values
    elif isinstance(node, ast.IfExp):
        parts = [node.test]
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Compare) and (len(node.ops) > 1 or _is_search(frame)):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Call):
        call = raising_call(frame)
        values = [argument.value for argument in call.tensors] if call is not None else []
        return next((value for value in values if value.numel() != 1), None)
    for part in parts:
        value = read(part, frame)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor) and item.numel() != 1:
                return item
    return None


def _unbuilt_loss(evidence: RaisedEvidence, loss: nn.Module) -> Draft:
    kind = type(loss).__name__
    draft = check.draft(evidence, "proven")
    draft.message = f"`{kind}` was given tensors where it takes options: it was built, not called"
    draft.cause = f"`{kind}(...)` makes a loss; the prediction and the target are given to what it makes"
    draft.at(*evidence.at_user_line("cause", "this builds a loss and does not compute one"))
    return draft.help(f"build it first, then call it: `{kind}()(input, target)`")
