"""The line that logs a value on some ranks only: Lightning exchanges it later, where no line of the user's is called.

The parent asks for it where the rank has gone on since, and the value is not known any more.
"""

from __future__ import annotations

import ast

import msgspec

from torchmedic.detect.ranks.culprit import decided
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, Difference
from torchmedic.source.branches import branches_around
from torchmedic.source.imports import files_behind
from torchmedic.source.syntax import calls_in, syntax_tree

_METHODS = ("log", "log_dict")


def with_logging_line(difference: Difference) -> Difference:
    """The difference with this line as the innermost of the only call that exchanges what was logged."""
    both = {"call": difference.call, "expected": difference.expected}
    exchanging = [name for name, call in both.items() if call is not None and _exchanges_logs(call)]
    call = both[exchanging[0]] if len(exchanging) == 1 else None
    line = _line_for_some(call) if call is not None else None
    if call is None or line is None:
        return difference
    placed = msgspec.structs.replace(call, frames=(line, *call.frames), library=())
    known = msgspec.structs.replace(difference, **{exchanging[0]: placed})
    # The source alone tells this line, so nothing is proven by it.
    return decided(known, "test", swapped=exchanging == ["expected"]) if difference.by == "nothing" else known


def _exchanges_logs(call: Collective) -> bool:
    return any("logger_connector" in frame.file for frame in call.library)


def _line_for_some(call: Collective) -> StackFrame | None:
    """The only line under an `if` about the rank that logs a value for an exchange."""
    found = {
        (file, made.lineno)
        for file in files_behind([frame.file for frame in call.frames])
        for made in calls_in(syntax_tree(file), *_METHODS)
        if any(keyword.arg == "sync_dist" and not _is_false(keyword.value) for keyword in made.keywords)
        and any(each.by_rank for each in branches_around(file, made.lineno))
    }
    return StackFrame(file=min(found)[0], line=min(found)[1], function="") if len(found) == 1 else None


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
