"""An evaluation records for a backward that never comes.

What: memory ran out in a forward pass of a model in evaluation mode, and most of it held activations that were saved
for backward. No backward is called on the result.

Why: `model.eval()` switches dropout and batch statistics; it does not switch gradients off. Without `torch.no_grad()`
the forward pass of an evaluation takes as much memory as that of training, often at a larger batch.

Cure: evaluate under `with torch.no_grad():` or `torch.inference_mode()`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis, Location
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.scopes import function_body

CODE, NAME = "TM405", "evaluation-with-gradients"

_SHARE = 0.3  # of all tensors


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None or autopsy.in_backward or autopsy.in_optimizer or not autopsy.builds_graph:
        return None
    caller = _caller(evidence)
    if caller is None or _is_trained(evidence):
        return None
    saved = sum(line.nbytes for line in autopsy.saved_lines)
    if saved < _SHARE * autopsy.book.everything or saved < (autopsy.asked or 0) // 2:
        return None
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"an evaluation keeps {size(saved)} for a backward that never comes",
        "the model is in evaluation mode, gradients are on, and no backward follows",
    )
    draft.at(_call(caller), *noticed(autopsy))
    shown(draft, autopsy)
    draft.help(f"run it under `with torch.no_grad():`{_prediction(autopsy, saved)}")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _prediction(autopsy: Autopsy, saved: int) -> str:
    """A word on what that would free; not tried, as the device is full."""
    return f", which saves none of the {size(saved)}" if autopsy.method == "fake replay" else ""


def _caller(evidence: RaisedEvidence) -> Frame | None:
    """The user's frame that calls the model in evaluation mode; None where the model is in training mode."""
    for position, frame in enumerate(evidence.frames):
        root = frame.module
        if root is None or not any(True for _ in root.parameters()):
            continue
        if any(child.training for child in root.modules()):
            return None
        callers = [outer for outer in evidence.frames[:position] if outer.is_user and outer.module is None]
        return callers[-1] if callers else None
    return None


def _call(caller: Frame) -> Location:
    return caller.location("cause", "gradients are on here")


def _is_trained(evidence: RaisedEvidence) -> bool:
    """Whether a function on the way goes backward, from that very loop: a frozen model in training, say."""
    for frame in evidence.frames:
        if not frame.is_user or frame.module is not None:
            continue
        body = function_body(frame)
        for scope in _blocks_around(body, frame.line) if body is not None else ():
            if any(_goes_backward(node) for node in ast.walk(scope)):
                return True
    return False


def _blocks_around(body: ast.AST, line: int) -> list[ast.AST]:
    """The innermost loop that holds a line, else the whole function; never the whole script."""
    best: ast.AST | None = None
    for node in ast.walk(body):
        if isinstance(node, ast.For | ast.While | ast.AsyncFor) and node.lineno <= line <= (node.end_lineno or 0):
            best = node
    if best is not None:
        return [best]
    return [body] if not isinstance(body, ast.Module) else [each for each in body.body if each.lineno >= line]


def _goes_backward(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("backward", "grad", "manual_backward")
    return False


RULE = Rule(CODE, NAME, check)
