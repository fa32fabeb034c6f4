"""Which names the statements of a step read, write and renew from step to step."""

from __future__ import annotations

import ast
from types import FrameType

from torchmedic.source.assignments import names_read, names_written, read_first
from torchmedic.source.segment.cut import CannotCut, Segment, cut
from torchmedic.source.syntax import FUNCTIONS, LOOPS, has_line, nodes_in, syntax_tree


def data_names(frame: FrameType, line: int, forward_line: int | None) -> frozenset[str]:
    """Names that the statements up to a line read before they assign them, or assign from a call.

    Only such as get another value from step to step: the others can be asked when they are needed.
    """
    try:
        segment = cut(frame, line, forward_line)
    except CannotCut:
        return frozenset()
    code = frame.f_code
    given = set(
        code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    )  # anew, where the function is called again
    return frozenset((read_first(segment.statements) | names_fetched(segment)) & (names_renewed(frame, line) | given))


def makes_loss(frame: FrameType, line: int) -> bool:
    """Whether a statement that calls backward reads what the statements before it in the same block have made."""
    try:
        *before, last = cut(frame, line, None).statements
    except CannotCut:
        return False
    return not names_read(last).isdisjoint({name for statement in before for name in names_written(statement)})


def names_renewed(frame: FrameType, line: int) -> set[str]:
    """Names that the loops around a line bind; where there is none, a function is called anew for each step."""
    tree = syntax_tree(frame.f_code.co_filename, frame.f_globals)
    around = [node for node in nodes_in(tree) if isinstance(node, FUNCTIONS | LOOPS) and has_line(node, line)]
    function = max((node.lineno for node in around if isinstance(node, FUNCTIONS)), default=0)
    loops = [node for node in around if isinstance(node, LOOPS) and node.lineno >= function]
    if loops:
        return {name for loop in loops for name in names_written(loop)}
    return set(frame.f_code.co_varnames) | set(frame.f_code.co_cellvars)


def names_fetched(segment: Segment) -> set[str]:
    """Names whose value comes from a call, which may be one that a replay cannot make again."""
    return {
        name
        for statement in segment.statements
        if any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for name in names_written(statement)
    }


def names_changed(segment: Segment) -> set[str]:
    """Names that the step reads and then gives another value: what they hold at its end is not what it began with."""
    written = {name for statement in segment.statements for name in names_written(statement)}
    return read_first(segment.statements) & written
