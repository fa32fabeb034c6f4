"""The threads and the tasks of pools that have ended, and what their functions would have signalled."""

from __future__ import annotations

import ast
import time
from typing import NamedTuple

from torchmedic.diagnose.rules.hangs._wait_chain import Waiter
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration
from torchmedic.records.inside import EndedThread, LockView
from torchmedic.records.report import Location
from torchmedic.records.stall import Stall
from torchmedic.source.syntax import callee, calls_in, nodes_in, syntax_tree
from torchmedic.source.user_code import relative

_SIGNALS = {
    "queue get": ("put", "put_nowait"),
    "event": ("set",),
    "semaphore": ("release",),
    "condition": ("notify", "notify_all"),
    "notification": ("notify", "notify_all"),
    "barrier": ("wait",),
    "future": ("set_result",),
    "queue join": ("task_done",),
}
_BROAD = ("Exception", "BaseException")
_TELLS = ("put", "put_nowait", "set_exception")


class Ended(NamedTuple):
    """A thread that has ended, whether its function signals what is waited for, and the `except` that hides why."""

    thread: EndedThread
    same: bool
    hides: int | None

    @property
    def told(self) -> str:
        """What is known of it, as a fact."""
        thread = self.thread
        lived = f" for {duration(max(0.0, thread.ended - thread.started))}" if thread.started else ""
        ago = duration(max(0.0, time.time() - thread.ended))
        where = f"{relative(thread.file)}:{thread.line}"
        how = f" with {thread.error}" if thread.error else ""
        return f"`{thread.target}` ({where}) ran in thread `{thread.name}`{lived}, and ended {ago} ago{how}"

    @property
    def failure(self) -> Location | None:
        """The line that raised the exception with which it ended."""
        thread = self.thread
        if not thread.error_line:
            return None
        label = f"`{thread.target}` ends here with {thread.error.partition(':')[0]}, and nobody learns of it"
        return line_location("cause", thread.error_file, thread.error_line, label)


def last_ended(stall: Stall, waiter: Waiter, wanted: LockView) -> Ended | None:
    """The last that has ended and signals in the way of the wait; one that signals the same name comes first."""
    view = stall.inside.get(waiter.process.pid)
    found = [each for thread in view.ended_threads if (each := _read(thread, wanted)) is not None] if view else []
    return next(iter([*(each for each in reversed(found) if each.same), *reversed(found)]), None)


def signals(thread: EndedThread) -> bool:
    """Whether the function of an ended thread or task gives items or signals to others."""
    functions = (node for node in nodes_in(syntax_tree(thread.file)) if _starts_at(node, thread.line))
    given = {name for names in _SIGNALS.values() for name in names} - {"wait"}
    return any(callee(call) in given for function in functions for call in calls_in(function))


def _read(thread: EndedThread, wanted: LockView) -> Ended | None:
    """What the source shows of a thread's function; None if it signals nothing of the kind."""
    tree = syntax_tree(thread.file)
    function = next((node for node in nodes_in(tree) if _starts_at(node, thread.line)), None)
    if function is None:
        return None
    names = {
        _last_name(ast.unparse(node.func.value))
        for node in calls_in(function)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _SIGNALS.get(wanted.kind, ())
    }
    handlers = [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and _hides(node)]
    same = _last_name(wanted.name) in names
    return Ended(thread, same, handlers[-1].lineno if handlers else None) if names else None


def _starts_at(node: ast.AST, line: int) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(each.lineno for each in decorators)]) == line


def _hides(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches everything and neither raises nor puts anything into a queue."""
    if handler.type is not None and ast.unparse(handler.type).rpartition(".")[2] not in _BROAD:
        return False
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    tells = any(isinstance(node, ast.Attribute) and node.attr in _TELLS for node in inside)
    return not tells and not any(isinstance(node, ast.Raise) for node in inside)


def _last_name(text: str) -> str:
    return text.rpartition(".")[2]
