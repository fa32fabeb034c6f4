"""Which lock a thread waits for, and which it holds, by its frames; how full an awaited queue is, which child it is.

A `threading.Lock` does not know its owner. But a frame that stands inside `with lock:` does, and so does one that has
called `lock.acquire()` and not yet `lock.release()`. Only things of the standard library (and torch's queues, which are
made of them) are asked, by their attributes.
"""

from __future__ import annotations

import ast
import os
import re
from collections import deque
from types import FrameType
from typing import Any

from torchmedic.observe.inside.peek import MISSING, attribute, expression, under_way, value_of
from torchmedic.records.inside import LockView
from torchmedic.source.syntax import function_of, nodes_in, syntax_tree, taken_at
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of

_PROCESS_FILE = os.path.join("multiprocessing", "process.py")
# Files of the standard library and of torch in which a thread stands while it waits in the name of its caller.
_WAITING_FILES = (
    "threading.py",
    "queue.py",
    os.path.join("concurrent", "futures", "_base.py"),
    os.path.join("concurrent", "futures", "thread.py"),
    os.path.join("multiprocessing", "queues.py"),
    os.path.join("multiprocessing", "connection.py"),
    os.path.join("multiprocessing", "synchronize.py"),
    _PROCESS_FILE,
    os.path.join("multiprocessing", "popen_fork.py"),
    os.path.join("multiprocessing", "popen_spawn_posix.py"),
    os.path.join("multiprocessing", "pool.py"),
    os.path.join("multiprocessing", "managers.py"),
    "selectors.py",
    "subprocess.py",
    "socket.py",
    "ssl.py",
)
# In these files too, but what a thread or process is there for: what they call waits in their own name.
_TASKS = frozenset(
    "_worker worker run _bootstrap _bootstrap_inner _feed _handle_workers _handle_tasks _handle_results".split()
)
_OWNER = re.compile(r"owner=(\d+)")
_KINDS = {
    "lock": "lock",
    "RLock": "reentrant lock",
    "_RLock": "reentrant lock",
    "Condition": "condition",
    "Event": "event",
    "Semaphore": "semaphore",
    "BoundedSemaphore": "semaphore",
    "Barrier": "barrier",
    "Lock": "lock between processes",
    "Future": "future",
    "Popen": "child process",
    "Process": "child process",
    "BaseProcess": "child process",
    "Thread": "thread",
    "AsyncResult": "result of a pool",
    "ApplyResult": "result of a pool",
    "IMapIterator": "result of a pool",
    "MapResult": "result of a pool",
}
NOTIFICATION = "notification"  # of a condition
_LOCKS = ("lock", "reentrant lock", "lock between processes", "semaphore", "condition")
_SHARED = ("multiprocessing", "torch")


def kind_of(value: Any) -> str | None:
    """What a thing that can be waited for is called."""
    for kind in type(value).__mro__:
        if kind.__name__ in _KINDS and kind.__module__.partition(".")[0] in (
            "_thread", "threading", "multiprocessing", "concurrent", "subprocess", "torch",
        ):  # fmt: skip
            return _KINDS[kind.__name__]
        if kind.__name__.endswith("Queue") and kind.__module__.partition(".")[0] in (
            "queue", "_queue", "multiprocessing", "torch",
        ):  # fmt: skip
            return "queue"
    return None


def waited_for(frames: list[FrameType]) -> LockView | None:
    """What a thread waits for, by its frames, the innermost first."""
    outer = next((at for at, frame in enumerate(frames) if not _is_waiting_file(frame)), len(frames))
    caller = frames[outer] if outer < len(frames) else None
    given: dict[str, Any] = {}
    value: Any = MISSING
    if caller is None:
        return None
    if not outer:
        value, function = _called_on(caller)
    # The outermost method of the library's that belongs to a thing one can wait for was called on it.
    for frame in reversed(frames[:outer]):
        known = dict(locals_of(frame))
        value, function = known.get("self", MISSING), frame.f_code.co_name
        given = {name: known[name] for name in ("timeout", "block", "blocking") if name in known}
        if value is not MISSING and kind_of(value) is not None:
            break
    kind = kind_of(value) if value is not MISSING else None
    if kind is None:
        return None
    if kind == "queue":
        kind = f"queue {function}"
    elif kind == "condition" and function.startswith("wait"):
        kind = NOTIFICATION
    return LockView(
        identity=id(value),
        kind=kind,
        name=_name(caller, function),
        file=caller.f_code.co_filename,
        line=caller.f_lineno,
        owner=_owner(value),
        **_facts(value, kind, given),
    )


def held(frames: list[FrameType]) -> list[LockView]:
    """The locks that a thread holds, by the frames of the user's that it is in."""
    found: list[LockView] = []
    for frame in frames:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "_bootstrap" and file.endswith(_PROCESS_FILE):
            break  # a forked process has the frames of its parent, but not its locks
        tree = syntax_tree(file) if is_user_file(file) else None
        if tree is None:
            continue
        taken = taken_at(function_of(tree, frame.f_code) or tree, frame.f_lineno)
        if not taken:
            continue
        known = dict(locals_of(frame))
        for node, line in taken:
            value = value_of(node, frame, known)
            kind = kind_of(value) if value is not MISSING else None
            if kind in _LOCKS and _is_taken(value):
                found.append(LockView(identity=id(value), kind=kind, name=ast.unparse(node), file=file, line=line))
    return found


def _is_waiting_file(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.endswith(_WAITING_FILES) and frame.f_code.co_name not in _TASKS and not is_user_file(file)


def _called_on(frame: FrameType) -> tuple[Any, str]:
    """The object whose method of C a frame is in: of `x.acquire()` and `with x:` it is x."""
    _, node = expression(frame)
    function = "acquire"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        function = node.func.attr
        node = node.func.value
    known = dict(locals_of(frame))
    return value_of(node, frame, known), function


def _name(frame: FrameType, function: str) -> str:
    text, node = expression(frame)
    loop = under_way(frame)
    # The method is called here, or by an iterator as in `for item in iter(queue.get, None):`.
    for method in nodes_in(loop.iter if isinstance(loop, ast.For) else node):
        if isinstance(method, ast.Attribute) and method.attr == function:
            return ast.unparse(method.value)
    if node is not None and not isinstance(node, ast.Call):
        return ast.unparse(node)
    return " ".join(text.split())[:60]


def _owner(value: Any) -> int | None:
    """The thread that a reentrant lock names in its own text, or that is waited for to end."""
    if type(value).__name__ in ("RLock", "_RLock"):
        match = _OWNER.search(object.__repr__(value) if type(value).__name__ == "_RLock" else repr(value))
        return int(match[1]) or None if match else None
    if kind_of(value) == "thread":
        ident = value.__dict__.get("_ident")
        return ident if isinstance(ident, int) else None
    return None


def _is_taken(value: Any) -> bool:
    if type(value).__name__ == "lock":
        return bool(value.locked())
    return True


def _facts(value: Any, kind: str, known: dict[str, Any]) -> dict[str, Any]:
    """Fields of `LockView`; `known` are the variables of the library's function that was called."""
    found: dict[str, Any] = {"shared": type(value).__module__.partition(".")[0] in _SHARED}
    if "timeout" in known:
        found["timed"] = known["timeout"] is not None
    elif known.get("block") is False or known.get("blocking") is False:
        found["timed"] = True
    if kind.startswith("queue"):
        found |= _queue(value)
    elif kind == "barrier":
        found |= {"count": _number(value, "_count"), "room": _number(value, "_parties")}
    elif kind == "child process":
        found["process"] = _child(value)
    return found


def _queue(value: Any) -> dict[str, int | None]:
    """A queue between threads counts its items, one between processes the room that is left."""
    items = attribute(value, "queue")
    room = _number(value, "maxsize") or _number(value, "_maxsize")
    free = attribute(attribute(value, "_sem"), "_semlock")
    if free is not MISSING and room is not None:
        return {"count": room - int(free._get_value()), "room": room}
    return {"count": len(items) if type(items) in (deque, list) else None, "room": room}


def _child(value: Any) -> int | None:
    """The number of a `subprocess.Popen`, or of a `multiprocessing.Process`, which has a Popen of its own."""
    own = attribute(value, "_popen")
    return _number(value if own in (MISSING, None) else own, "pid")


def _number(holder: Any, name: str) -> int | None:
    value = attribute(holder, name)
    return value if type(value) is int else None
