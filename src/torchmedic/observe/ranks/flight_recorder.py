"""The log of this rank: the ring of our own, and beside it what torch's Flight Recorder knows of calls made in C++.

The recorder is on by default since torch 2.11 and knows gloo since 2.8; where there is none, the ring is all there is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchmedic.errors import UnreadableRun
from torchmedic.observe.ranks import plain_pickle
from torchmedic.observe.ranks.call_site import MAX_LIBRARY_FRAMES, MAX_USER_FRAMES
from torchmedic.records import StackFrame
from torchmedic.records.ranks import BACKWARD, Collective, RankLog
from torchmedic.runfolder import ring
from torchmedic.runfolder.files import RANK_LOG, write_atomically
from torchmedic.source.user_code import is_library_file, is_user_file

WRAPPER = "collective"  # the function of `recorder.py` around a collective
_OWN = os.path.join("torchmedic", "observe", "ranks") + os.sep
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Byte": "uint8",
    "Bool": "bool",
}


def log(folder: Path) -> RankLog | None:
    """Everything that is known of the collectives of this process; None if it has called none."""
    with contextlib.suppress(UnreadableRun):
        own = ring.read(folder / ring.FILE)
        if own.pid != os.getpid():
            return None
        entries = _entries()
        if entries is None:
            return own
        native = [_call(entry) for entry in entries if not _is_ours(entry)]
        calls = with_lines_of_backward(sorted([*own.calls, *native], key=lambda call: call.time))
        return RankLog(
            rank=own.rank,
            pid=own.pid,
            world_size=own.world_size,
            calls=tuple(calls),
            complete=True,
            dropped=own.dropped,
        )
    return None


def with_lines_of_backward(calls: list[Collective]) -> list[Collective]:
    """Give calls without any line that of the backward that they came in.

    On a GPU, backward runs in a thread of torch's own, where the recorder sees no Python.
    """
    found = []
    backward: Collective | None = None
    for call in calls:
        if call.op == BACKWARD:
            backward = call
        if call.native and not call.frames and backward is not None:
            found.append(msgspec.structs.replace(call, frames=backward.frames, library=backward.library))
        else:
            found.append(call)
    return found


def publish(folder: Path) -> RankLog | None:
    """Write the log into the folder of this process, where the parents of all ranks find it."""
    found = log(folder) if (folder / ring.FILE).exists() else None
    if found is not None:
        write_atomically(folder / RANK_LOG, msgspec.json.encode(found))
    return found


def _entries() -> list[dict[str, Any]] | None:
    """The calls that torch has recorded; None if it records none. NCCL has a recorder of its own.

    To name the lines, torch imports `torch._inductor` in the thread that asks. An import by the main thread at the same
    time would fail. So torch is asked only after that import; DistributedDataParallel does it before its first bucket.
    """
    if "_inductor" not in vars(torch):
        return None
    c10d = getattr(torch._C, "_distributed_c10d", None)
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    return entries_of(dump(True, True, False) for dump in dumps if dump is not None)


def entries_of(dumps: Iterable[bytes]) -> list[dict[str, Any]] | None:
    """The calls in several dumps, each call once: since torch 2.15 one dump may hold the calls of all backends."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for data in dumps:
        told = plain_pickle.loads(data)
        for entry in (told.get("entries") if isinstance(told, dict) else None) or ():
            found.setdefault((entry["profiling_name"], entry["time_created_ns"], entry.get("record_id")), entry)
    return list(found.values()) or None


def _is_ours(entry: dict[str, Any]) -> bool:
    """Whether a call came from Python, and so through our own recorder."""
    innermost = (entry.get("frames") or ())[:3]
    return any(frame.get("name") == WRAPPER and _OWN in frame.get("filename", "") for frame in innermost)


def _call(entry: dict[str, Any]) -> Collective:
    frames = entry.get("frames") or ()
    users = [each for each in frames if is_user_file(each["filename"])][:MAX_USER_FRAMES]
    library = [each for each in frames if is_library_file(each["filename"])][:MAX_LIBRARY_FRAMES]
    return Collective(
        op=str(entry["profiling_name"]).rpartition(":")[2],
        group=str(entry["process_group"][0]),
        ordinal=int(entry.get("collective_seq_id") or 0),
        shapes=tuple(tuple(shape) for shape in entry.get("input_sizes") or ()),
        dtypes=tuple(_DTYPES.get(name, name.lower()) for name in entry.get("input_dtypes") or ()),
        frames=tuple(map(_frame, users)),
        library=tuple(map(_frame, library)),
        native=True,
        time=int(entry["time_created_ns"]) / 1e9,
    )


def _frame(entry: dict[str, Any]) -> StackFrame:
    return StackFrame(file=entry["filename"], line=entry["line"], function=entry["name"])
