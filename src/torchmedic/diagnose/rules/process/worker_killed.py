"""A DataLoader worker ended without an exception.

What: a worker process ended before it delivered its batch to the main process. It raised no Python exception: it called
`exit`, or a signal ended it.

Why: `sys.exit` or `os._exit` in the dataset or in a library, a native library that ends the process when it fails, or a
kill from outside. The diagnosis names the items that the worker was reading, if the sampler provides them.

Cure: read these items in the main process (`num_workers=0`), where a debugger can follow the end of the process.
"""

from __future__ import annotations

import re
import signal
import sys
from types import CodeType
from typing import Any

from torchmedic.detect.failures.death import lost_senders
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.evidence.data_loading import Request, function_node, iterator_in, samples_code
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe import lifecycle
from torchmedic.records import Location
from torchmedic.source.live_frames import frames_of, node_location
from torchmedic.source.returns import code_of
from torchmedic.source.syntax import callee, calls_in
from torchmedic.source.user_code import is_user_file

_NEWS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal)")
_ENDS = frozenset({"exit", "_exit", "quit", "abort", "kill", "killpg", "raise_signal"})


@rule("TM822", "worker-killed")
def check(evidence: RaisedEvidence) -> Draft | None:
    error = evidence.incident.error
    frames = frames_of(error.__traceback__)
    iterator = iterator_in(frames)
    news = _NEWS.search(str(error)) if isinstance(error, RuntimeError) else None
    if news is not None:
        pids = [int(pid) for pid in news[1].split(",")]
        owner = _iterator_of(pids)  # the batch that was waited for may be of another loader
        iterator = owner if owner is not None else iterator
        workers = [worker for worker in getattr(iterator, "_workers", ()) if worker.pid in pids]
    else:
        workers = lost_senders(error) if evidence.incident.worker is None else []
        pids = [worker.pid for worker in workers]
    if not pids:
        return None
    endings = [_ending(worker.exitcode) for worker in workers if worker.exitcode is not None]
    how = endings[0] if endings else "ended"
    draft = check.draft(evidence, "likely")
    draft.message = f"a DataLoader worker {how} and left no exception"
    draft.cause = f"process {listed([str(pid) for pid in pids])} ended before it delivered its batch"
    request = Request(frames, iterator)
    draft.at(
        _ending_call(iterator)
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
    return draft.help("read these items with `num_workers=0`: the main process then ends at the line that does it")


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


def _iterator_of(pids: list[int]) -> Any:
    """The iterator of a worker whose end was noticed outside of its loader: a signal handler raises anywhere."""
    watching = lifecycle.current()
    for iterator in watching.batches.iterators() if watching is not None else ():
        if any(worker.pid in pids for worker in getattr(iterator, "_workers", ())):
            return iterator
    return None


def _undelivered(iterator: Any, worker: Any) -> list[Any]:
    """The items that the worker had been given and that have not come back: one of them may have ended it."""
    watching = lifecycle.current()
    if watching is None:
        return []
    number = iterator._workers.index(worker)
    drawn = watching.batches.under_way(iterator)
    given = sorted(index for index, task in iterator._task_info.items() if len(task) == 1 and task[0] == number)
    batches = [drawn[index] for index in given if index in drawn]
    items = [item for batch in batches for item in (batch if isinstance(batch, list | tuple) else [batch])]
    return [item for item in items if item is not None]


def _ending_call(iterator: Any) -> Location | None:
    """The one call that ends a process, in what a worker runs of the user's own."""
    calls = [
        (code, node)
        for code in _codes_of_worker(iterator)
        if (method := function_node(code)) is not None
        for node in calls_in(method, *_ENDS)
    ]
    if len(calls) != 1:
        return None
    code, call = calls[0]
    return node_location("cause", code.co_filename, call, "this call ends the process that it is made in")


def _codes_of_worker(iterator: Any) -> list[CodeType]:
    """The user's functions that a worker calls: for a sample, for a batch, and when it starts."""
    given = [each for name in ("_collate_fn", "_worker_init_fn") if (each := getattr(iterator, name, None)) is not None]
    functions = [getattr(each, "func", each) for each in given]  # behind a `partial`
    dataset = getattr(iterator, "_dataset", None)
    codes = [samples_code(dataset), *(code_of(each) for each in functions)]
    found: dict[CodeType, None] = {}
    for code in codes:  # grows
        if code is None or code in found or not is_user_file(code.co_filename):
            continue
        found[code] = None
        names = {callee(node) for node in calls_in(function_node(code))}
        known = vars(sys.modules.get(type(dataset).__module__, object)) | vars(type(dataset))
        codes += [code_of(known[name]) for name in names & known.keys() if callable(known[name])]
    return list(found)
