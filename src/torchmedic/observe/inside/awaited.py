"""What is known of a thing that a thread waits for: how full a queue is, who waits at a barrier, which child it is.

Only things of the standard library (and torch's queues, which are made of them) are asked, by their attributes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torchmedic.observe.inside.peek import MISSING, attribute

_SHARED = ("multiprocessing", "torch")


def facts(value: Any, kind: str, known: dict[str, Any]) -> dict[str, Any]:
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
