"""A DataLoader worker ended and left no exception.

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
import time
from typing import Any

from torchmedic.diagnose.describe import listed
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.observe import agent
from torchmedic.records import Diagnosis, Location
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame, frames_of, node_location
from torchmedic.replay.loading import Request, function_node, iterator_in, samples_code

CODE, NAME = "TM822", "worker-killed"

_PATIENCE = 10.0  # seconds: on a machine that is taken, a process takes long to end
_NEWS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)")
_ENDS = frozenset({"exit", "_exit", "quit", "abort", "kill", "killpg", "raise_signal"})


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    error = evidence.incident.error
    frames = frames_of(error.__traceback__)
    iterator = iterator_in(frames)
    news = _NEWS.search(str(error)) if isinstance(error, RuntimeError) else None
    if news is not None:
        pids = [int(pid) for pid in news[1].split(",")]
        iterator = iterator if iterator is not None else _iterator_of(pids)
        workers = [worker for worker in getattr(iterator, "_workers", ()) if worker.pid in pids]
    else:
        workers = _lost_sender(evidence, frames, iterator)
        pids = [worker.pid for worker in workers]
    if not pids:
        return None
    endings = [_ending(worker.exitcode) for worker in workers if worker.exitcode is not None]
    how = endings[0] if endings else "ended"
    draft = Draft(
        CODE,
        NAME,
        "likely",
        f"a DataLoader worker {how} and left no exception",
        f"process {listed([str(pid) for pid in pids])} was gone when its batch was waited for",
    )
    request = Request(frames, iterator)
    draft.at(
        _ending_call(request.dataset)
        or request.at_method("cause", "this runs in the worker")
        or request.at_loop("cause", "noticed here"),
        request.at_loop("surfaced", "noticed here"),
    )
    for worker in workers[:1]:
        items = _undelivered(iterator, worker)
        if items:
            draft.because(f"it had not delivered the dataset items {listed([str(item) for item in items], 16)}")
        draft.because(
            f"worker {iterator._workers.index(worker)} of {len(iterator._workers)}, exit code {worker.exitcode}"
        )
    draft.help("read these items with `num_workers=0`: the main process then ends at the line that does it")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _lost_sender(evidence: RaisedEvidence, frames: list[Frame], iterator: Any) -> list[Any]:
    """The workers that are gone, where a batch could not be received: its memory is fetched from the sender."""
    if evidence.incident.worker is not None or not isinstance(evidence.incident.error, OSError | EOFError):
        return []
    if not any(frame.function in ("rebuild_storage_fd", "rebuild_storage_filename") for frame in frames):
        return []
    workers = list(getattr(iterator, "_workers", ()))
    # The end of a process is seen in its connections before it can be waited for.
    deadline = time.monotonic() + _PATIENCE
    while not (gone := [worker for worker in workers if worker.exitcode]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return gone


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


def _undelivered(iterator: Any, worker: Any) -> list[Any]:
    """The items that the worker had been given and that have not come back: one of them may have ended it."""
    watching = agent.current()
    if watching is None:
        return []
    number = iterator._workers.index(worker)
    drawn = watching.batches.under_way(iterator)
    given = sorted(index for index, task in iterator._task_info.items() if len(task) == 1 and task[0] == number)
    batches = [drawn[index] for index in given if index in drawn]
    items = [item for batch in batches for item in (batch if isinstance(batch, list | tuple) else [batch])]
    return [item for item in items if item is not None]


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


RULE = Rule(CODE, NAME, check)
