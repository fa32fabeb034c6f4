"""A DataLoader worker ended without raising anything.

What: a worker process was gone when the main process waited for its batch. There is no Python exception of its own to
show: it called `exit`, or a signal ended it.

Why: `sys.exit` or `os._exit` in the dataset or in a library that it calls, a native library that ends the process when
it fails, or somebody who killed it. The items that the worker was reading are named where the sampler gave them.

Cure: read these items in the main process (`num_workers=0`), where the end of the process can be followed.
"""

from __future__ import annotations

import ast
import re
import signal
from typing import Any

from torchmedic.diagnose.describe import listed
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe import agent
from torchmedic.records import Diagnosis, Location
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import frames_of, node_location
from torchmedic.replay.loading import Loading, function_node, iterator_in, samples_code

CODE, NAME = "TM822", "worker-killed"

_NEWS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)")
_ENDS = frozenset({"exit", "_exit", "quit", "abort", "kill", "killpg", "raise_signal"})


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    error = evidence.incident.error
    news = _NEWS.search(str(error)) if isinstance(error, RuntimeError) else None
    if news is None:
        return None
    pids = [int(pid) for pid in news[1].split(",")]
    frames = frames_of(error.__traceback__)
    iterator = iterator_in(frames) or _iterator_of(pids)
    workers = [worker for worker in getattr(iterator, "_workers", ()) if worker.pid in pids]
    endings = [_ending(worker.exitcode) for worker in workers if worker.exitcode is not None]
    how = endings[0] if endings else "ended"
    draft = Draft(
        CODE,
        NAME,
        "likely",
        f"a DataLoader worker {how} without raising an exception",
        f"process {listed([str(pid) for pid in pids])} was gone when its batch was waited for",
    )
    loading = Loading(None, frames, iterator)
    ending = _ending_call(loading.dataset)
    if ending is not None:
        draft.at(ending)
    else:
        draft.at(_at_method(loading.dataset) or loading.at_loop("cause", "noticed here"))
    draft.at(loading.at_loop("surfaced", "noticed here"))
    for worker in workers[:1]:
        items = _reading(evidence, iterator, worker, came_through_next=iterator_in(frames) is not None)
        if items:
            draft.because(f"it was reading the dataset items {listed([str(item) for item in items], 8)}")
        draft.because(
            f"worker {iterator._workers.index(worker)} of {len(iterator._workers)}, exit code {worker.exitcode}"
        )
    draft.help("read these items with `num_workers=0`: the main process then ends at the line that does it")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def _iterator_of(pids: list[int]) -> Any:
    """The iterator of a worker whose end was noticed outside of the loader: a signal handler raises anywhere."""
    watching = agent.current()
    for iterator in watching.batches.iterators() if watching is not None else ():
        if any(worker.pid in pids for worker in getattr(iterator, "_workers", ())):
            return iterator
    return None


def _reading(evidence: RaisedEvidence, iterator: Any, worker: Any, *, came_through_next: bool) -> list[Any]:
    """The batch that the worker had not finished: the oldest of those that it was given."""
    watching = agent.current()
    tasks = getattr(iterator, "_task_info", {})
    number = iterator._workers.index(worker)
    given = [index for index, task in tasks.items() if len(task) == 1 and task[0] == number]
    if watching is None or not given:
        return []
    drawn = watching.batches.under_way(iterator)
    if came_through_next:
        # The batch that was being waited for has already been taken from those under way.
        drawn.insert(0, list(evidence.incident.batch_indices))
    position = min(given) - iterator._rcvd_idx
    items = drawn[position] if 0 <= position < len(drawn) else []
    return [item for item in (items if isinstance(items, list | tuple) else [items]) if item is not None]


def _ending_call(dataset: Any) -> Location | None:
    """The one call in the dataset's own method that ends a process."""
    code = samples_code(dataset)
    method = function_node(code) if code is not None else None
    calls = [
        node
        for node in (ast.walk(method) if method is not None else ())
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in _ENDS
    ]
    if code is None or len(calls) != 1:
        return None
    return node_location("cause", code.co_filename, calls[0], "this call ends the process that it is made in")


def _at_method(dataset: Any) -> Location | None:
    code = samples_code(dataset)
    method = function_node(code) if code is not None else None
    if code is None or method is None:
        return None
    from torchmedic.replay.frames import place

    return place("cause", code.co_filename, method.lineno, "this runs in the worker")


RULE = Rule(CODE, NAME, check)
