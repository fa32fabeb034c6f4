"""Shared memory (/dev/shm) is full.

What: tensors are passed between processes through files in /dev/shm, a small file system in memory. It had no space for
another object: a batch of a DataLoader worker, a tensor that was shared or put into a queue, a lock. The process got an
error (No space left on device), or died (SIGBUS).

Why: a container has 64 MB of /dev/shm by default. Every worker keeps `prefetch_factor` batches there, and a batch that
the loop still uses is there too. Programs that were killed may have left files behind.

Cure: give the container more (`docker run --shm-size=8g` or `--ipc=host`; an `emptyDir` of medium Memory at /dev/shm in
Kubernetes), use fewer workers, a smaller `prefetch_factor` or batch, or `num_workers=0`, which uses no shared memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from torchmedic.detect.failures.exhaustion import SHARED
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import draft_of, who
from torchmedic.diagnose.words.format import size
from torchmedic.records import Location
from torchmedic.records.death import Death

if TYPE_CHECKING:
    from torchmedic.evidence.data_loading import Loading
    from torchmedic.evidence.exception import RaisedEvidence

_MAX_FREE_WHEN_FULL = 1 << 20  # bytes: less than one page of a batch
_DOCKER_DEFAULT_BYTES = 64 << 20  # bytes that a container gets if nobody asks for more
_MIN_SHARE, _MIN_TENSORS = 0.4, 3  # of all shared memory, and of tensors, from which on a name is to blame
_OWNERS = ("synchronize.py", "shared_memory.py", "heap.py")  # of multiprocessing, which keep their files there
FOLDER = Path("/dev/shm")
_MAX_FILES = 10_000
_MAX_PROCESSES = 4_000


@rule("TM415", "shared-memory-full")
def check(evidence: RaisedEvidence | Death) -> Draft | None:
    return _of_death(evidence) if isinstance(evidence, Death) else _raised(evidence)


def _raised(evidence: RaisedEvidence) -> Draft | None:
    from torchmedic.evidence.data_loading import loading_of
    from torchmedic.observe.failures.worker_failures import shared_bytes

    if not _is_refused(evidence):
        return None
    failure, loading = evidence.incident.worker, loading_of(evidence)
    asked = failure.shared if failure is not None else shared_bytes([frame.live for frame in evidence.frames])
    room = shared_memory()
    of = f" ({size(room.size)})" if room is not None else ""
    want = f": there is no room for {size(asked)}" if asked else ""
    draft = check.draft(evidence, "proven")
    draft.message = f"shared memory is full{want} in /dev/shm{of}"
    draft.cause = "the kernel refused it: no space is left there"
    kept = _kept(draft, evidence, room)
    draft.at(kept)
    _place(draft, evidence, loading, asked)
    _in_flight(draft, evidence, loading, asked)
    if room is not None:
        _room(draft, room)
    if kept is not None:
        draft.help("keep a copy instead of what the loader yielded (`x.clone()`), or only what is needed of it")
    _advise(draft, room, of_loader=loading is not None or _in_worker())
    return draft


def _is_refused(evidence: RaisedEvidence) -> bool:
    """Whether the exception is about shared memory: by its words, or by who asked for a file without a name."""

    exhaustion = evidence.exhaustion
    if exhaustion is not None:
        return exhaustion.where == SHARED and not _is_users_own(evidence)
    if not isinstance(evidence.error, OSError) or evidence.error.errno != errno.ENOSPC:
        return False
    inner = evidence.frames[-1].file if evidence.frames else ""
    return os.path.basename(inner) in _OWNERS and "multiprocessing" in inner


def _is_users_own(evidence: RaisedEvidence) -> bool:
    """Whether a worker only passes on words that the user's code has raised."""
    from torchmedic.source.user_code import is_user_file, source_line

    failure = evidence.incident.worker
    inner = failure.frames[0] if failure is not None and failure.frames else None
    return (
        inner is not None
        and is_user_file(inner.file)
        and source_line(inner.file, inner.line).strip().startswith("raise")
    )


def _kept(draft: Draft, evidence: RaisedEvidence, room: SharedMemory | None) -> Location | None:
    """The line that keeps what has been received: a batch stays in shared memory as long as somebody holds it."""
    from torchmedic.diagnose.rules.memory._table import filled_at
    from torchmedic.evidence.memory.accounting.walk import shared_holdings

    frames = [frame.live for frame in reversed(evidence.frames)]
    most = next(iter(shared_holdings(frames)), None)
    if most is None or room is None or most.tensors < _MIN_TENSORS or most.nbytes < _MIN_SHARE * room.size:
        return None
    told = f"`{most.holder.path}` holds {size(most.nbytes)} of it in {_many(most.tensors, 'tensor')}"
    draft.because(told)
    return filled_at(most.holder, "cause", told)


def _place(draft: Draft, evidence: RaisedEvidence, loading: Loading | None, asked: int) -> None:
    from torchmedic.source.lookup.loader_lines import LOST, loader_call, lost_on_its_way
    from torchmedic.source.user_code import is_user_file

    if draft.has_place and loading is not None:
        draft.at(loading.at_loop("surfaced", "the batch was asked for here"))
        draft.because(loading.process)
    elif loading is not None:
        many = len(getattr(loading.iterator, "_workers", ())) or 1
        label = f"its {_many(many, 'worker')} fill /dev/shm"
        draft.at(loading.at_loader("cause", label) or loader_call("cause", label, loading.file))
        draft.at(loading.at_loop("surfaced" if draft.has_place else "cause", "the batch was asked for here"))
        draft.because(loading.process)
    elif any(is_user_file(frame.file) for frame in evidence.frames):
        draft.at(*evidence.at_user_line("cause", f"{size(asked)} were to be shared here" if asked else "refused here"))
    else:  # a thread that only sends what others have put into a queue
        draft.at(*lost_on_its_way("its workers fill /dev/shm"))
        draft.because(LOST)


def _in_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _in_flight(draft: Draft, evidence: RaisedEvidence, loading: Loading | None, asked: int) -> None:
    """Add the bytes that the workers of a loader may have in shared memory at the same time."""
    iterator = loading.iterator if loading is not None else None
    workers, ahead = (getattr(iterator, name, 0) or 0 for name in ("_num_workers", "_prefetch_factor"))
    batch = sum(int(tensor.nbytes) for tensor in evidence.incident.batch) or asked
    if workers and ahead and batch:
        total = workers * ahead * batch
        draft.because(
            f"{_many(workers, 'worker')} x {ahead} batches ahead (prefetch_factor) x {size(batch)}: up to {size(total)}"
        )


def _room(draft: Draft, room: SharedMemory) -> None:
    draft.because(f"/dev/shm: {size(room.used)} of {size(room.size)} are taken now, {size(room.free)} are free")
    if room.inodes == 0:
        draft.because("no inodes are left there: there are too many files, whatever their size")
    if room.left:
        draft.because(
            f"{size(room.left)} of it lie in {_many(room.left_files, 'file')} that no process to be seen from here has "
            f"open, such as /dev/shm/{room.example}"
        )


def _advise(draft: Draft, room: SharedMemory | None, *, of_loader: bool) -> None:
    if room is not None and room.left > room.size // 4:
        draft.help("remove the files that ended programs have left in /dev/shm")
    draft.help("give the container more shared memory: `docker run --shm-size=8g`, or `--ipc=host`")
    if of_loader:
        draft.help("use fewer workers, a smaller `prefetch_factor` or batch, or `num_workers=0`")
    else:
        draft.help("share less at the same time, and drop what has been received")


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _of_death(death: Death) -> Draft | None:
    """A page of shared memory that could not be had ends the process that writes to it."""
    if death.signal != "SIGBUS" or death.shm_low is None or death.from_outside:
        return None
    full = death.shm_low < _MAX_FREE_WHEN_FULL
    # What a worker had there is gone with it, often before anybody can look.
    if not full and (death.part != "worker" or death.shm_size is None or death.shm_size > _DOCKER_DEFAULT_BYTES):
        return None
    of = f" ({size(death.shm_size)})" if death.shm_size else ""
    draft = draft_of(
        check,
        death,
        "proven" if full else "likely",
        f"{who(death)} died of a bus error: shared memory is {'full' if full else 'small'}, in /dev/shm{of}",
        "/dev/shm had no room for the page that was written (SIGBUS)"
        if full
        else "the kernel had no page to give (SIGBUS); batches of workers need more /dev/shm than a container gets",
    )
    draft.because(f"least free space in /dev/shm in the last seconds: {size(death.shm_low)}")
    room = shared_memory()
    if room is not None and room.left:
        _room(draft, room)
    _advise(draft, room, of_loader=death.part == "worker")
    return draft


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in /dev/shm. `left` is what lies in files that no process has open, as far as all processes can be seen.

    Torch removes the name of its files at once, so that they go with their processes. A file with a name outlives them.
    """

    size: int
    free: int
    inodes: int = 1  # that are free
    left: int = 0
    left_files: int = 0
    example: str = ""

    @property
    def used(self) -> int:
        return self.size - self.free


def shared_memory(folder: Path = FOLDER, proc: Path = Path("/proc")) -> SharedMemory | None:
    """The state of `/dev/shm` now; None where there is no such file system."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    left = _left(folder, proc)
    return SharedMemory(
        size=found.f_blocks * found.f_frsize,
        free=found.f_bavail * found.f_frsize,
        inodes=found.f_favail if found.f_files else 1,
        left=sum(left.values()),
        left_files=len(left),
        example=max(left, key=lambda name: left[name], default=""),
    )


def _left(folder: Path, proc: Path) -> dict[str, int]:
    """Files of ours that no process has open or mapped, by name; none where that cannot be told."""
    mine: dict[tuple[int, int], tuple[str, int]] = {}
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder))[:_MAX_FILES]:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                # What is no more than a lock may wait for the next process that wants it.
                if entry.is_file(follow_symlinks=False) and status.st_uid == os.getuid() and status.st_blocks > 8:
                    mine[status.st_dev, status.st_ino] = (entry.name, status.st_blocks * 512)
    if not mine:
        return {}
    names = {f"{folder}/{name}" for name, _ in mine.values()}
    for path in _used(proc):
        names.discard(path)
    return {name: nbytes for name, nbytes in mine.values() if f"{folder}/{name}" in names}


def _used(proc: Path) -> Iterator[str]:
    """Every file that a process which we may look into has mapped or open."""
    processes = [name for name in os.listdir(proc) if name.isdigit()] if proc.is_dir() else []
    for pid in processes[:_MAX_PROCESSES]:
        with contextlib.suppress(OSError):
            for line in (proc / pid / "maps").read_text(errors="replace").splitlines():
                at = line.find("/")
                if at >= 0:
                    yield line[at:].removesuffix(" (deleted)")
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(proc / pid / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(proc / pid / "fd" / descriptor)
