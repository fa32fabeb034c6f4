"""Graphs that are recorded for a backward: one that is still to come, or one that never comes, as in an evaluation.

Where a backward is still to go through a graph, to keep numbers instead would be the wrong advice; to go backward more
often is the right one.
"""

from __future__ import annotations

import ast
import re
from types import CodeType
from typing import NamedTuple

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.attempts import callers_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.retained_graphs import Retained
from torchmedic.evidence.memory.source.differentiated import (
    is_differentiated,
    is_differentiated_later,
    is_variable_differentiated,
    source_goes_backward,
)
from torchmedic.evidence.memory.source.fillers import fillers_of
from torchmedic.source.live_frames import Frame
from torchmedic.source.syntax import BACKWARD_CALLS, FUNCTIONS, innermost, nodes_in, syntax_tree

_MIN_SAVED_SHARE = 0.3  # share of all tensors


def in_parts(held: Retained) -> str:
    """Advice for graphs that are wanted. Only losses are known to be able to go backward one by one."""
    name = held.holder.path
    if held.is_scalar:
        return f"go backward through each part by itself: `{name}` holds the graphs of all of them"
    return f"go backward through fewer of them at a time: `{name}` holds the graphs of all, until one backward comes"


def is_wanted(held: Retained, evidence: RaisedEvidence) -> bool:
    """Whether the graphs are of this step, for a backward that is still to come."""
    holder = held.holder
    if held.for_nothing or held.outlived or not held.is_young:
        return False
    if held.of_this_step and _is_for_backward(held):
        return True
    name = re.split(r"[.\[]", holder.path, maxsplit=1)[0]
    if not holder.in_frame and held.is_container and is_differentiated_later(frozenset({holder.attribute or name})):
        return True
    local = holder.in_frame and isinstance(holder.scope, CodeType)
    return local and is_variable_differentiated(evidence.frames, holder.scope, name)


def _is_for_backward(held: Retained) -> bool:
    """Whether the function that fills the holder, or another one, goes backward through it: it may want the graphs."""
    fillers = fillers_of(held.holder)
    name = held.holder.path.partition("[")[0].rpartition(".")[2]
    if not fillers or is_differentiated_later(frozenset({name})):
        return True
    tree = syntax_tree(fillers[0].file)
    inside = innermost(tree, fillers[0].node.lineno, FUNCTIONS) or tree
    names = {node.attr for node in nodes_in(inside) if isinstance(node, ast.Attribute)}
    return not names.isdisjoint(BACKWARD_CALLS)


class Evaluation(NamedTuple):
    """The call of the model, the bytes saved for backward, and whether the model was told that it is no training."""

    call: Frame
    saved: int
    is_declared: bool


def evaluation_of(autopsy: Autopsy) -> Evaluation | None:
    """The evaluation that memory ran out in, where much of it is kept for a backward that does not follow."""
    evidence = autopsy.evidence
    if autopsy.in_backward or autopsy.in_optimizer or not autopsy.builds_graph:
        return None
    callers = callers_of(evidence)
    root = next((frame.module for frame in evidence.frames if frame.module is not None), None)
    if root is None or not callers or not any(each.requires_grad for each in root.parameters()):
        return None
    is_declared = not any(child.training for child in root.modules())
    saved = sum(line.nbytes for line in autopsy.saved_lines)
    if saved < _MIN_SAVED_SHARE * autopsy.book.everything or saved < (autopsy.asked or 0) // 2:
        return None
    if not (is_declared or _is_trained_elsewhere(autopsy)) or is_differentiated(callers):
        return None
    return Evaluation(callers[-1], saved, is_declared)


def _is_trained_elsewhere(autopsy: Autopsy) -> bool:
    """Whether other code trains: weights were updated before, or no code of the user calls backward."""
    updated = autopsy.agent is not None and autopsy.agent.clock.updates > 0
    return updated or not source_goes_backward()
