"""The user's line that makes a DataLoader, fills a queue or sets a limit, where no frame leads to it."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable

from torch.utils.data import get_worker_info

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, place
from torchmedic.source.syntax import callee, calls_in, last_name
from torchmedic.source.user_code import user_frame
from torchmedic.source.user_variables import user_trees

LOST = "what was sent is lost: the process that waits for it is told nothing, and may wait for ever"
_SETTERS = frozenset({"setrlimit", "prlimit"})


def lost_on_its_way(label: str) -> list[Location]:
    """The loader or the call behind a thread that only sends what others have put into a queue, and where they are now.

    Args:
        label: What to say of the loader, in one of its workers.
    """
    worker = get_worker_info() is not None
    made = loader_call("cause", label) if worker else queue_call("cause", "sent from here")
    here = "the batch is waited for here" if worker else "the process was here"
    now = main_thread_line("surfaced" if made is not None else "cause", here)
    return [each for each in (made, now) if each is not None]


def loader_call(role: Role, label: str, file: str = "", keyword: str = "num_workers") -> Location | None:
    """The one call that makes a DataLoader with this argument, in this file if several do; None where that is open."""
    calls = _calls(lambda name: name.endswith("DataLoader"))
    calls = [each for each in calls if any(word.arg == keyword for word in each[1].keywords)] or calls
    if len(calls) > 1:
        calls = [each for each in calls if each[0] == file]
    return _only(calls, role, label)


def queue_call(role: Role, label: str) -> Location | None:
    """The one call that puts something into a queue; None where there are several."""
    return _only(_calls(lambda name: name in ("put", "put_nowait")), role, label)


def main_thread_line(role: Role, label: str) -> Location | None:
    """Where the main thread of this process is; in a forked worker, what its parent was doing when it was made."""
    frame = user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    return place(role, frame.f_code.co_filename, frame.f_lineno, label) if frame is not None else None


def _calls(is_wanted: Callable[[str], bool]) -> list[tuple[str, ast.Call]]:
    found: dict[tuple[str, int], tuple[str, ast.Call]] = {}
    for file, tree in user_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and is_wanted(callee(node)):
                found[file, node.lineno] = (file, node)
    return list(found.values())


def _only(calls: list[tuple[str, ast.Call]], role: Role, label: str) -> Location | None:
    return node_location(role, calls[0][0], calls[0][1], label) if len(calls) == 1 else None


def limit_call(name: str, role: Role, label: str) -> Location | None:
    """The first call in the user's files that sets this limit."""
    for file, tree in user_trees():
        for node in calls_in(tree, *_SETTERS):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            if any(last_name(each) == name for each in given):
                return node_location(role, file, node, label)
    return None
