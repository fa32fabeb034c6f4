"""The call of the model that a loss comes from, followed backwards through the source of the function that computes it.

What was noted of a step is its first call of a model. An evaluation may have come before the call that is trained.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.source.bindings import assignment_before
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import read
from torchmedic.source.syntax import calls_in, runs_backward

_MAX_STATEMENTS = 6  # that a loss is followed back through


def trained_call(frame: Frame) -> ast.Call | None:
    """The call of the model that the backward which a frame is at goes back to; None where the source does not show it.

    The loss is the owner of `backward`, or an argument: `accelerator.backward(loss)`, `self.manual_backward(loss)`.
    """
    call = frame.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not runs_backward(call):
        return None
    pending: list[ast.AST] = [call.func.value, *call.args[:1]]
    seen: set[str] = set()
    for _ in range(_MAX_STATEMENTS):
        if not pending:
            break
        part = pending.pop(0)
        found = next(_calls(part, frame), None)
        if found is not None:
            return found
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id not in seen:
                seen.add(node.id)
                made = assignment_before(frame, node.id)
                value = getattr(made, "value", None)
                if isinstance(value, ast.expr):
                    pending.append(value)
    return None


def _calls(part: ast.AST, frame: Frame) -> Iterator[ast.Call]:
    """Calls of modules that have weights: a loss has none."""
    for node in calls_in(part):
        called = read(node.func, frame)
        if isinstance(called, torch.nn.Module) and next(called.parameters(), None) is not None:
            yield node
