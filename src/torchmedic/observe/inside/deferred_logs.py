"""The line that logged a value: Lightning exchanges what `self.log` was given later, at the end of an epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from types import FrameType

from torchmedic.observe.inside.peek import attribute
from torchmedic.records import StackFrame
from torchmedic.source.syntax import FUNCTIONS, calls_in, innermost
from torchmedic.source.user_variables import locals_of, user_trees

_LOGGED = "_ResultMetric"  # what Lightning keeps of one name that was logged
_METHODS = ("log", "log_dict")


def logged_at(frames: Sequence[FrameType]) -> StackFrame | None:
    """The only call of the user's that logs the value which is exchanged by these frames, innermost first."""
    for frame in frames:
        holder = dict(locals_of(frame)).get("self") if "logger_connector" in frame.f_code.co_filename else None
        if type(holder).__name__ == _LOGGED:
            meta = attribute(holder, "meta")
            name, hook = attribute(meta, "name"), attribute(meta, "fx")
            if type(name) is str and type(hook) is str:
                return _line_of(name, hook.partition(".")[0])
    return None


def _line_of(name: str, hook: str) -> StackFrame | None:
    """Calls that write the name out come first, then those in the hook, then all others."""
    found: dict[tuple[bool, bool], list[StackFrame]] = {}
    for file, tree in user_trees():
        for call in calls_in(tree, *_METHODS):
            around = innermost(tree, call.lineno, FUNCTIONS)
            function = around.name if isinstance(around, FUNCTIONS) else ""
            spelt = any(_may_be(part, name) for part in ast.walk(call))
            frame = StackFrame(file=file, line=call.lineno, function=function)
            found.setdefault((spelt, function == hook), []).append(frame)
    best = found[max(found)] if found else []
    return best[0] if len(best) == 1 else None


def _may_be(node: ast.AST, name: str) -> bool:
    """Whether a text of the source is this name, or an f-string that may be: `f"{stage}_loss"` is `val_loss`."""
    if isinstance(node, ast.JoinedStr):
        known = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in node.values]
        return re.fullmatch("".join(known), name) is not None
    return isinstance(node, ast.Constant) and node.value == name
