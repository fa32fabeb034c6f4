"""A file could not be written because its file system is full.

What: the file system had no space for the data that this line writes: no free bytes, no free inodes, or the quota or
the size limit of a file was reached. The file written so far is incomplete.

Why: checkpoints that are never deleted, a log or a cache that grows with every step, a small /tmp or container layer.

Cure: free space, or write to another file system. Save to a temporary name and rename the file when it is complete, so
that a full disk never destroys the last good checkpoint, and keep only the newest few.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import stat
from collections.abc import Iterator
from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.data_loading import loading_of
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.memory.host import free_space
from torchmedic.observe.step.tensors import bytes_in
from torchmedic.records import Location
from torchmedic.source.live_frames import Frame, frames_of
from torchmedic.source.user_code import relative

_REFUSED = {
    errno.ENOSPC: "no space is left on the file system",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the process may write",
}
# What writers say that have lost the reason on the way.
_CUT_SHORT = re.compile(r"unexpected pos \d+|failed writing file|iostream error|\d+ requested and \d+ written")
_LITTLE = 1 << 20  # bytes
_TARGETS = ("f", "file", "filename", "fname", "path", "filepath", "fp", "dst")


@rule("TM830", "disk-full")
def check(evidence: RaisedEvidence) -> Draft | None:
    chain = list(_chain(evidence.incident.error))
    why = next((_REFUSED[code] for error in chain if (code := _errno(error)) in _REFUSED), "")
    if not why and not any(_CUT_SHORT.search(str(error)) for error in chain):
        return None
    frames = [frame for error in chain for frame in frames_of(error.__traceback__)]
    path = _target(chain, frames)
    need = next((bytes_in(frame.variables["obj"]) for frame in frames if _saves(frame)), 0)
    room = free_space(path) if path and not _is_device(path) else None
    why = why or _proof(path, need, room)
    if not why:
        return None
    shown = relative(os.path.abspath(path)) if path else ""
    what = f"`{shown}`" if shown else "a file"
    draft = check.draft(evidence, "proven", f"{what} could not be written: {why}", _cause(why, need, room))
    worker = evidence.incident.worker
    if worker is not None and (loading := loading_of(evidence)) is not None:
        draft.at(
            loading.at_user_frame("cause", "written here"), loading.at_loop("surfaced", "the batch was asked for here")
        )
    else:
        draft.at(_first_refusal(chain), *evidence.at_user_line("surfaced", "noticed here"))
    if path and os.path.isfile(path):
        draft.because(f"`{shown}` is incomplete: {size(os.path.getsize(path))}")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        draft.because(f"a file of this process may have at most {size(limit)} (ulimit -f)")
    if room is not None and room[2] == 0 and room[1]:
        draft.because("no inodes are left: there are too many files, whatever their size")
    draft.help("free space on that file system, or write to another one")
    if need:
        draft.help(
            "save under a temporary name and rename the file when it is complete, so that the last good file survives"
        )
    return draft


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _first_refusal(chain: list[BaseException]) -> Location | None:
    """The user's line of the earliest exception: closing a file that is not written out raises once more."""
    for error in reversed(chain):
        own = [frame for frame in frames_of(error.__traceback__) if frame.is_user]
        if own and (_errno(error) in _REFUSED or _CUT_SHORT.search(str(error))):
            return own[-1].location("cause", "written here")
    return None


def _errno(error: BaseException) -> int | None:
    text = str(error)
    if "inotify" in text:
        return None  # the number of watches is used up, which has the same number and nothing to do with a disk
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    for code in _REFUSED:
        if os.strerror(code) in text or f"os error {code}" in text:
            return code
    return None


def _saves(frame: Frame) -> bool:
    return frame.function in ("save", "_legacy_save", "_save") and "obj" in frame.variables and not frame.is_user


def _target(chain: list[BaseException], frames: list[Frame]) -> str:
    """The file that was being written: named by the exception, or held by the function that wrote it."""
    for error in chain:
        for name in (getattr(error, "filename2", None), getattr(error, "filename", None)):
            if isinstance(name, str | os.PathLike):
                return os.fspath(name)
    for frame in reversed(frames):
        if frame.file.endswith(os.path.join("multiprocessing", "synchronize.py")):
            return "/dev/shm"
        if not frame.is_user:
            for name in _TARGETS:
                if found := _path(frame.variables.get(name)):
                    return found
    opened: list[str] = []
    for frame in reversed(frames):
        held = [*frame.variables.values(), *getattr(frame.variables.get("self"), "__dict__", {}).values()]
        opened += [str(value.name) for value in reversed(held) if _is_written(value)] if frame.is_user else []
    return next((path for path in (*opened, *_standard_streams()) if _is_full(path)), opened[0] if opened else "")


def _standard_streams() -> Iterator[str]:
    """The files behind stdout and stderr, which a `print` writes to."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{number}")


def _is_full(path: str) -> bool:
    if _is_device(path):
        return os.stat(path).st_rdev == os.makedev(1, 7)  # /dev/full, which never has room
    room = free_space(path) if os.path.exists(path) else None
    return room is not None and (room[0] < _LITTLE or (room[2] == 0 and room[1] > 0))


def _path(value: Any) -> str:
    if _is_written(value):
        return str(value.name)
    return os.fspath(value) if isinstance(value, str | os.PathLike) and len(os.fspath(value)) < 4096 else ""


def _is_written(value: Any) -> bool:
    mode = getattr(value, "mode", "")
    return isinstance(getattr(value, "name", None), str) and isinstance(mode, str) and bool(set(mode) & set("wax+"))


def _is_device(path: str) -> bool:
    return os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode)


def _proof(path: str, need: int, room: tuple[int, int, int] | None) -> str:
    """Why a write was cut short, where only its failure is known; empty where nothing proves a reason."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and need > limit:
        return _REFUSED[errno.EFBIG]
    if path and _is_device(path) and _is_full(path):
        return _REFUSED[errno.ENOSPC]
    # A little may be free again: what was kept back for this diagnosis, and what the writer has removed.
    if room is not None and (room[0] < max(need, _LITTLE) or (room[2] == 0 and room[1])):
        return _REFUSED[errno.ENOSPC]
    return ""


def _cause(why: str, need: int, room: tuple[int, int, int] | None) -> str:
    facts = []
    if need:
        facts.append(f"{size(need)} of tensors are to be saved")
    if room is not None and room[1]:
        facts.append(f"{size(room[0])} of {size(room[1])} are free on its file system now")
    return "; ".join(facts) or why
