"""The process has as many open files as it may have, and could open no more.

What: every open file, pipe and socket takes a number in the process, and there is a limit for them (`ulimit -n`). A
tensor that came from a DataLoader worker takes one too, as long as it is kept: its memory is a file that both share.

Why: files that are opened for each item and never closed; batches of a loader with workers that are kept in a list;
pools, loaders or connections that are made again and again.

Cure: open files in a `with` block. Keep copies (`tensor.clone()`) or numbers of what a worker sent, or call
`torch.multiprocessing.set_sharing_strategy("file_system")`.
"""

from __future__ import annotations

import ast
import errno
import io
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.data_loading import loading_of
from torchmedic.evidence.dataset_item import datasets_in_use
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import frames_of, node_location
from torchmedic.source.syntax import ADDING_METHODS, nodes_in, syntax_tree
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import loaded_files

_SAID = re.compile(r"Too many open files|received 0 items of ancdata")
_REFUSED = (errno.EMFILE, errno.ENFILE)
_MAX_CHAIN = 10  # exceptions, one raised while the other was handled
_LEAST = 8  # things in one container
_SHARED = "memory that tensors share with workers"


class _Kept(NamedTuple):
    """A container of the user's that keeps files open."""

    name: str
    things: int
    shares: bool  # tensors, and not files


@rule("TM831", "too-many-open-files")
def check(evidence: RaisedEvidence) -> Draft | None:
    error, worker = evidence.error, evidence.incident.worker
    refused = isinstance(error, OSError) and error.errno in _REFUSED
    if not refused and _SAID.search(evidence.message if worker is None else worker.message) is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kinds, kept = _open_files(), _kept(evidence)
    of_worker = worker is not None and worker.worker is not None
    draft = check.draft(evidence, "proven", "no file could be opened: the process has as many open as it may have")
    draft.cause = f"the limit is {count(limit, 'open file')}" if not of_worker else "a DataLoader worker says so"
    filled = _filled(kept.name) if kept is not None and kept.shares else None
    draft.at(filled)
    loading = loading_of(evidence)
    label = "opens one file more than the process may have"
    role: Role = "surfaced" if filled else "cause"
    draft.at(loading.at_user_frame(role, label) if loading is not None else _first(evidence, role, label))
    draft.at(*evidence.at_user_line("surfaced" if draft.has_place else "cause", "noticed here"))
    if not of_worker:
        shown = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common(3))
        draft.because(f"of {sum(kinds.values())} open files: {shown}" if shown else "")
    if kept is not None:
        what = "tensors from workers" if kept.shares else "open files"
        draft.because(f"`{kept.name}` holds {kept.things} {what}")
    if kinds[_SHARED] * 2 > sum(kinds.values()) or (kept is not None and kept.shares):
        draft.help("keep copies of what workers send: `tensor.clone()`, or the numbers that are needed")
        return draft.help("or share by name: `torch.multiprocessing.set_sharing_strategy('file_system')`")
    return draft.help("open the file in a `with` block, or close it when it has been read")


def _first(evidence: RaisedEvidence, role: Role, label: str) -> Location | None:
    """The user's line of the earliest such exception: what cleans up after it raises once more."""
    error: BaseException | None = evidence.incident.error
    found = None
    for _ in range(_MAX_CHAIN):
        if error is None:
            break
        if isinstance(error, OSError) and error.errno in _REFUSED:
            frames = [frame for frame in frames_of(error.__traceback__) if frame.is_user]
            found = frames[-1].location(role, label) if frames else found
        error = error.__cause__ or error.__context__
    return found


def _open_files() -> Counter[str]:
    """The open files of this process by their kind; none where the system does not tell."""
    found: Counter[str] = Counter()
    folder = "/proc/self/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return found
    for number in numbers:
        try:
            path = os.readlink(f"{folder}/{number}")
        except OSError:
            continue
        if path.startswith("/dev/shm/torch_"):
            found[_SHARED] += 1
        elif path.startswith("/"):
            found[f"in `{os.path.dirname(path)}`"] += 1
        else:
            found[f"of kind `{path.partition(':')[0]}`"] += 1
    return found


def _kept(evidence: RaisedEvidence) -> _Kept | None:
    """The container among the user's variables and their attributes that keeps most files open."""
    found = [_weighed(name, value) for name, value in _containers(evidence)]
    return max((each for each in found if each.things >= _LEAST), key=lambda each: each.things, default=None)


def _containers(evidence: RaisedEvidence) -> Iterator[tuple[str, Any]]:
    owners: list[tuple[str, Any]] = [(f"{type(each).__name__}", each) for each in datasets_in_use()]
    for frame in evidence.frames:
        if frame.is_user:
            owners += [*frame.variables.items(), *frame.live.f_globals.items()]
    for name, value in owners:
        if not name.startswith("__"):
            yield name, value
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict) and not isinstance(value, type) and type(value).__name__ != "module":
                yield from ((f"{name}.{attr}", part) for attr, part in list(held.items()))


def _weighed(name: str, value: Any) -> _Kept:
    parts = list(value.values()) if isinstance(value, dict) else list(value) if type(value) in (list, tuple) else []
    files = sum(isinstance(part, io.IOBase) and not part.closed for part in parts)
    shared = sum(_is_shared(part) for part in parts)
    return _Kept(name, max(files, shared), shared > files)


def _is_shared(part: Any) -> bool:
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else (part,)
    return any(isinstance(each, torch.Tensor) and each.is_cpu and each.is_shared() for each in parts)


def _filled(name: str) -> Location | None:
    """The only statement of the user's that adds to a container of this name."""
    last = name.rpartition(".")[2]
    found = []
    for file in loaded_files():
        for node in nodes_in(syntax_tree(file)) if is_user_file(file) else ():
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=own) | ast.Attribute(attr=own), attr=method)):
                    if own == last and method in ADDING_METHODS:
                        found.append(node_location("cause", file, node, f"`{name}` keeps what workers sent"))
    return found[0] if len(found) == 1 else None
