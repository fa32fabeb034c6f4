"""A thread waits for items of a queue, and the thread that filled the queue has ended.

What: a thread waits in `queue.get()` without a time limit. Every thread that could put something into the queue has
ended, so the wait never ends.

Why: an exception ended the producer, and an `except` that does nothing but return or print hid it. Or the producer was
done and did not say so: the consumer expects one more item.

Cure: let the producer put a mark into the queue in a `finally:` (`None`, or the exception itself), and raise in the
consumer when the mark arrives. `get(timeout=60)` turns the hang into an exception.
"""

from __future__ import annotations

import ast
import time
from typing import NamedTuple

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._nobody_left import Silence, nobody
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import at, stall_rule
from torchmedic.records.inside import EndedThread, LockView
from torchmedic.records.stall import Stall
from torchmedic.source.syntax import calls_in, nodes_in, syntax_tree
from torchmedic.source.user_code import relative

_PUTS = ("put", "put_nowait")
_BROAD = ("Exception", "BaseException")


class _Producer(NamedTuple):
    """A thread that has ended, the queues that its function fills, and the `except` that may have hidden why."""

    thread: EndedThread
    queues: set[str]
    hides: int | None


@stall_rule("TM529", "dead-producer-thread")
def check(stall: Stall) -> Draft | None:
    for waiter in chain(stall):
        wanted = waiter.wanted
        if wanted is None or wanted.kind != "queue get" or wanted.shared:
            continue
        if not waiter.stands(stall) or waiter.ends_by_itself:
            continue
        silence, producer = nobody(stall, waiter), _producer(stall, waiter, wanted)
        if silence is not None and producer is not None:
            return _told(stall, waiter, wanted, silence, producer)
    return None


def _producer(stall: Stall, waiter: Waiter, wanted: LockView) -> _Producer | None:
    """The last thread that has ended and put items into a queue; one into a queue of the same name comes first."""
    view = stall.inside.get(waiter.process.pid)
    found = [each for thread in view.ended_threads if (each := _read(thread)) is not None] if view is not None else []
    same = [each for each in found if _last_name(wanted.name) in each.queues]
    return next(iter([*reversed(same), *reversed(found)]), None)


def _read(thread: EndedThread) -> _Producer | None:
    """What the source shows of a thread's function; None if it puts nothing into a queue."""
    tree = syntax_tree(thread.file)
    function = next((node for node in nodes_in(tree) if _starts_at(node, thread.line)), None)
    if function is None:
        return None
    queues = {
        _last_name(ast.unparse(node.func.value))
        for node in calls_in(function)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PUTS
    }
    handlers = [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and _hides(node)]
    return _Producer(thread, queues, handlers[-1].lineno if handlers else None) if queues else None


def _starts_at(node: ast.AST, line: int) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(each.lineno for each in decorators)]) == line


def _hides(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches everything and neither raises nor puts anything into a queue."""
    if handler.type is not None and ast.unparse(handler.type).rpartition(".")[2] not in _BROAD:
        return False
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    tells = any(isinstance(node, ast.Attribute) and node.attr in (*_PUTS, "set_exception") for node in inside)
    return not tells and not any(isinstance(node, ast.Raise) for node in inside)


def _last_name(text: str) -> str:
    return text.rpartition(".")[2]


def _told(stall: Stall, waiter: Waiter, wanted: LockView, silence: Silence, producer: _Producer) -> Draft:
    thread = producer.thread
    sure = _last_name(wanted.name) in producer.queues
    draft = check.draft(stall, silence.grade if sure else "likely")
    draft.message = f"the run waits for the queue `{wanted.name}`, and the thread that filled it has ended"
    draft.cause = (
        f"`get` has no time limit, and thread `{thread.name}` ({thread.target}) puts nothing into the queue any more"
    )
    draft.at(at(waiter.frame, "cause", f"waits for queue `{wanted.name}`"))
    if thread.started_line:
        draft.at(line_location("origin", thread.started_file, thread.started_line, "the producer was started here"))
    if producer.hides is not None:
        draft.at(line_location("writer", thread.file, producer.hides, "an exception that is caught here goes unseen"))
    lived = duration(max(0.0, thread.ended - thread.started))
    ago = duration(max(0.0, time.time() - thread.ended))
    where = f"{relative(thread.file)}:{thread.line}"
    draft.because(f"thread `{thread.name}` ran `{thread.target}` ({where}) for {lived}, and ended {ago} ago")
    draft.because(*silence.facts)
    if producer.hides is not None:
        draft.help("let the handler put the exception into the queue, or raise it: now nobody learns of it")
    draft.help("put a mark into the queue in a `finally:` of the producer, and raise when the mark arrives")
    return draft.rated(silence.severity)
