"""Graphs that a name holds on purpose: a backward is still to go through them.

To keep numbers instead would be the wrong advice there; to go backward more often is the right one.
"""

from __future__ import annotations

import ast
import re
from types import CodeType

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.retained_graphs import Retained
from torchmedic.evidence.memory.source.differentiated import is_differentiated_later, is_variable_differentiated
from torchmedic.evidence.memory.source.fillers import fillers_of
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.syntax import FUNCTIONS, nodes_in
from torchmedic.source.vocabulary import BACKWARD_CALLS


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
    """Whether the function that fills it goes backward, or another one through it: then the graphs may be wanted."""
    fillers = fillers_of(held.holder)
    name = held.holder.path.partition("[")[0].rpartition(".")[2]
    if not fillers or is_differentiated_later(frozenset({name})):
        return True
    tree = syntax_tree(fillers[0].file)
    line = fillers[0].node.lineno
    inside: ast.AST | None = tree
    for node in nodes_in(tree):
        if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0):
            inside = node
    names = {node.attr for node in nodes_in(inside) if isinstance(node, ast.Attribute)}
    return not names.isdisjoint(BACKWARD_CALLS)
