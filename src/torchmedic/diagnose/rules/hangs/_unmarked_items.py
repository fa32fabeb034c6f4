"""Items that a thread took from a queue and never marked as done: `queue.join()` waits for them."""

from __future__ import annotations

import ast

from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import at
from torchmedic.records import Location
from torchmedic.records.inside import InsideView, LockView, PyFrame
from torchmedic.source.syntax import LOOPS, callee, calls_in, has_line, innermost, syntax_tree


def consumers(view: InsideView, wanted: LockView) -> list[PyFrame]:
    """The lines of the user's at which threads wait for the next item of a queue."""
    found = []
    for thread in view.threads:
        waits, frame = thread.waits_for, thread.user_frame
        if waits is not None and frame is not None and (waits.kind, waits.identity) == ("queue get", wanted.identity):
            found.append(frame)
    return found


def left_out(taker: PyFrame) -> Location | None:
    """Where the loop of a consumer goes on without `task_done()`; None where the source does not show it."""
    loop = innermost(syntax_tree(taker.file), taker.line, LOOPS)
    if loop is None:
        return None
    marks = [call.lineno for call in calls_in(loop) if callee(call) == "task_done" and call.lineno >= taker.line]
    if not marks:
        return at(taker, "cause", "takes items, and the loop never calls `task_done()`")
    finals = [node for node in ast.walk(loop) if isinstance(node, ast.Try) and _marks(node.finalbody)]
    for node in ast.walk(loop):
        if not isinstance(node, ast.Continue) or innermost(loop, node.lineno, LOOPS) is not loop:
            continue
        is_marked = any(line <= node.lineno for line in marks) or any(has_line(each, node.lineno) for each in finals)
        if node.lineno > taker.line and not is_marked:
            return line_location("cause", taker.file, node.lineno, "goes on without `task_done()`")
    return None


def _marks(statements: list[ast.stmt]) -> bool:
    return any(callee(call) == "task_done" for statement in statements for call in calls_in(statement))
