"""The function that `mp.spawn` starts cannot be called with the arguments that it gets.

What: `mp.spawn(function, args=...)` calls `function(rank, *args)` in every process. This call fails before the first
line of the function runs.

Why: `args=(config)` is not a tuple: the comma of `(config,)` is missing. Or the function has no parameter for the rank,
which comes first; or `args` has the rank once more, or more or fewer values than the function takes.

Cure: pass a tuple, and let the first parameter of the function be the rank.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import calls_in, syntax_tree

_STARTS = ("spawn", "start_processes")


@rule("TM726", "spawn-arguments-do-not-fit")
def check(evidence: RaisedEvidence) -> Draft | None:
    last = evidence.frames[-1] if evidence.frames else None
    if last is None or last.function != "_wrap" or not last.file.endswith("torch/multiprocessing/spawn.py"):
        return None
    function, given = last.variables.get("fn"), last.variables.get("args")
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    name = code.co_name
    draft = check.draft(evidence, "proven")
    if not hasattr(given, "__iter__"):
        draft.message = f"`{name}` cannot be started: `args` is a `{type(given).__name__}` and no tuple"
        draft.cause = "one value in parentheses is a tuple only with a comma after it"
        draft.help("write the comma of a tuple with one value: `args=(value,)`")
    elif not _fits(function, given):
        many = len(tuple(given))  # type: ignore[arg-type]
        draft.message = f"`{name}` cannot be started: its parameters do not fit the rank and {many} values of `args`"
        draft.cause = f"`mp.spawn` calls `{name}(rank, *args)`, and the parameters are `{_signature(function)}`"
        draft.help(f"give `{name}` the rank as its first parameter, and one parameter for each value of `args`")
    else:
        return None
    call = _start_of(code.co_filename, name)
    role: Role = "cause" if call is None else "origin"
    return draft.at(call, line_location(role, code.co_filename, code.co_firstlineno, "to be called"))


def _fits(function: Any, given: Any) -> bool:
    try:
        inspect.signature(function).bind(0, *given)
    except TypeError:
        return False
    return True


def _signature(function: Any) -> str:
    return ", ".join(inspect.signature(function).parameters) or "none"


def _start_of(file: str, name: str) -> Location | None:
    """The call that starts processes with a function, where the file of the function has one such call."""
    calls = [
        node
        for node in calls_in(syntax_tree(file), *_STARTS)
        for function in [*node.args[:1], *(word.value for word in node.keywords if word.arg == "fn")]
        if isinstance(function, ast.Name | ast.Attribute) and ast.unparse(function).rpartition(".")[2] == name
    ]
    return node_location("cause", file, calls[0], "`args` is passed on here") if len(calls) == 1 else None
