"""A rank uses a file or folder while another rank makes it.

What: a rank has read a file that another process was still writing, has opened one that came into being a moment later,
has made a folder that another rank had just made, or has renamed or removed what another rank had just taken away.

Why: every rank prepares the data, the cache or the output folder by itself, with a test such as `if not
os.path.exists(path)`. Between the test and the use another rank comes in. Or rank 0 prepares the file, and the other
ranks do not wait for it. Or every rank saves the same checkpoint, renames it, or removes old ones.

Cure: let one rank make the file, and let all ranks pass a `dist.barrier()` before they read it. Write to a temporary
name and rename the file when it is complete. Make folders with `exist_ok=True`.
Let one rank rename and remove files.
"""

from __future__ import annotations

import ast
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.assignments import names_read
from torchmedic.source.branches import branches_around, nodes_around
from torchmedic.source.syntax import callee, calls_in, last_name
from torchmedic.source.user_code import relative

_MAX_WAIT = 1.5  # seconds for a file that another rank may be about to make
_MAX_AGE = 10.0  # seconds since another rank has made a folder
_TAKING = ("rename", "replace", "renames", "move", "remove", "unlink", "rmdir", "rmtree")
_TESTS = ("exists", "isfile", "isdir", "is_file", "is_dir")
_LISTS = ("glob", "iglob", "rglob", "listdir", "iterdir", "scandir")
_RENAMING = ("replace", "with_suffix", "with_name", "with_stem", "format", "removesuffix")
_PROC = "/proc"


@rule("TM723", "file-not-ready")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not _has_other_ranks() or evidence.incident.worker is not None:
        return None
    error = evidence.error
    path = _path(error.filename) if isinstance(error, OSError) else ""
    if path and isinstance(error, FileNotFoundError):
        return _taken_away(evidence, path) or _too_early(evidence, path)
    if path and isinstance(error, FileExistsError):
        return _made_twice(evidence, path)
    for each in _used_files(evidence):
        writers = list(_writers(each))
        if os.getpid() in writers:
            continue  # a log that all ranks write
        writer = next(iter(writers), None)
        later = os.path.getmtime(each) - evidence.incident.time
        if writer is not None or (evidence.incident.time and later > 0):
            shown, who = relative(os.path.abspath(each)), _name(writer)
            draft = check.draft(evidence, "proven")
            draft.message = f"`{shown}` was read while {who} was writing it"
            draft.cause = (
                f"{who} still has the file open for writing, and this rank did not wait for it"
                if writer is not None
                else f"the file was written to for at least {later:.2f} s after this rank had failed to read it"
            )
            draft.because(f"`{shown}` has {size(os.path.getsize(each))} now")
            return _ended(draft, evidence, "read here, before it was complete")
    return None


def _too_early(evidence: RaisedEvidence, path: str) -> Draft | None:
    begin = time.monotonic()
    while not os.path.exists(path):
        if time.monotonic() - begin > _MAX_WAIT:
            return None
        time.sleep(0.02)
    shown = relative(os.path.abspath(path))
    draft = check.draft(evidence, "proven", f"`{shown}` was used before another rank had made it")
    later = time.time() - (evidence.incident.time or time.time())
    draft.cause = f"the file was not there, and is there {max(later, 0.0):.1f} s later"
    writer = next(_writers(path), None)
    draft.because(f"{_name(writer)} writes it now" if writer is not None else "")
    return _ended(draft, evidence, "not there at this moment")


def _taken_away(evidence: RaisedEvidence, path: str) -> Draft | None:
    """What was to be renamed or removed is gone: it is under its new name, or was there when it was looked for."""
    frame, error = evidence.user_frame, evidence.error
    taking = frame.node if frame is not None else None
    if frame is None or not isinstance(taking, ast.Call) or callee(taking) not in _TAKING or os.path.exists(path):
        return None
    users = (each for each in evidence.frames if each.is_user)
    if any(branch.by_rank for each in users for branch in branches_around(each.file, each.line)):
        return None  # only this rank comes here
    target = _path(error.filename2) if isinstance(error, OSError) else ""
    now = evidence.incident.time or time.time()
    shown = relative(os.path.abspath(path))
    draft = check.draft(evidence, "likely", f"another rank has taken `{shown}` away")
    draft.cause = f"more than one rank comes to this `{callee(taking)}`, and only the first one finds the file"
    if target and os.path.exists(target) and now - os.stat(target).st_ctime < _MAX_AGE:
        draft.because(
            f"`{relative(os.path.abspath(target))}` came to its name {now - os.stat(target).st_ctime:.1f} s before"
        )
    elif _was_seen(nodes_around(frame.file, frame.line), taking):
        draft.because("this rank has looked for the file a moment before, and found it")
    else:
        return None
    draft.at(*evidence.at_user_line("cause", "not there any more"))
    return draft.help("let one rank rename and remove files, and let the others wait in a `dist.barrier()`")


def _was_seen(around: list[ast.AST], taking: ast.Call) -> bool:
    """Whether the file was found in front of this call: by an `if` around it, or in a list of files of its function."""
    parts = [part for child in ast.iter_child_nodes(taking) for part in ast.walk(child)]
    if any(isinstance(part, ast.JoinedStr | ast.Add) or last_name(part) in _RENAMING for part in parts[1:]):
        return False  # the name may be another one than that which was found
    used = names_read(taking) - {"os", "shutil"}
    tests = [node.test for node in around if isinstance(node, ast.If)]
    if any(used & names_read(call) for test in tests for call in calls_in(test, *_TESTS)):
        return True
    own = next((node for node in reversed(around) if isinstance(node, ast.FunctionDef)), around[0] if around else None)
    return any(call.lineno <= taking.lineno for call in calls_in(own, *_LISTS))


def _made_twice(evidence: RaisedEvidence, path: str) -> Draft | None:
    age = time.time() - os.stat(path).st_ctime if os.path.isdir(path) else _MAX_AGE
    if age >= _MAX_AGE:
        return None
    shown = relative(os.path.abspath(path))
    draft = check.draft(evidence, "likely", f"the folder `{shown}` was made by another rank a moment before")
    draft.cause = f"the folder is {max(age, 0.0):.1f} s old, and every rank tries to make it"
    draft.at(*evidence.at_user_line("cause", "made here once more"))
    return draft.help("pass `exist_ok=True`, or let one rank make the folder")


def _ended(draft: Draft, evidence: RaisedEvidence, label: str) -> Draft:
    draft.at(*evidence.at_user_line("cause", label))
    draft.help("let one rank make the file, and let all ranks pass a `dist.barrier()` before they read it")
    return draft.help("write to a temporary name, and rename the file when it is complete")


def _has_other_ranks() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return bool(torch.distributed.get_world_size() > 1)
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def _used_files(evidence: RaisedEvidence) -> Iterator[str]:
    """The files that the failing call was given: in its own frames, else in the statement that called."""
    for frame in reversed(evidence.frames):
        names = set(frame.variables)
        if frame.is_user:
            names = {node.id for node in ast.walk(frame.statement or ast.Pass()) if isinstance(node, ast.Name)}
        for name in names & set(frame.variables):
            value = frame.variables[name]
            path = _path(value) or _path(getattr(value, "name", None))
            if path and os.path.isfile(path):
                yield path
        if frame.is_user:
            return


def _path(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    return text if isinstance(text, str) and len(text) < 4096 and "\0" not in text else ""


def _writers(path: str) -> Iterator[int]:
    """The processes that have a file open for writing."""
    file = os.stat(path)
    for entry in os.listdir(_PROC):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ends at this moment, or belongs to another user
            for descriptor in os.listdir(f"{_PROC}/{entry}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"{_PROC}/{entry}/fd/{descriptor}"), file) and _writes(
                        int(entry), descriptor
                    ):
                        yield int(entry)


def _writes(pid: int, descriptor: str) -> bool:
    with open(f"{_PROC}/{pid}/fdinfo/{descriptor}") as lines:
        flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    return flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND


def _name(pid: int | None) -> str:
    """A process by its rank, if its launcher has told it one."""
    if pid is None:
        return "another process"
    with contextlib.suppress(OSError), open(f"{_PROC}/{pid}/environ", "rb") as file:
        told = dict(each.partition(b"=")[::2] for each in file.read().split(b"\0"))
        if told.get(b"RANK", b"").isdigit():
            return f"rank {int(told[b'RANK'])}"
    return f"process {pid}"
