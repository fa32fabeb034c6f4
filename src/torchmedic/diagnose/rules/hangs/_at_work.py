"""Who goes on while the main thread makes no progress, also who reads data: a sign that the run is slow, not hung.

Nothing here is a proof of health. A thread that burns a core may spin, and one that sleeps may wake for nothing; so
such verdicts are notes, and the run is looked at again later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.diagnose.words.format import duration, size
from torchmedic.diagnose.words.stall import BUSY, SLEEPS, command, descendants, short
from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Stall

MOVING = 4e6  # bytes a second: more than a log, and than a process reads and writes to answer our own question
_RECEIVES = ("running", "read", "pread64", "readv", "recvfrom", "recvmsg", "poll", "ppoll", "select", "pselect6")
_RECENT_SECONDS = 1.0
_MIN_WAKES_PER_SECOND = 2.0  # more than the one wake that may have nothing to do with it
_MIN_UNASKED_BYTES_PER_SECOND = 32 * 1024  # of a process that was not asked
_HELD = ("lock", "reentrant lock")  # by one thread, so that no other can help
_STRANGER_LIMITS = 10  # times the limit, for which an idle thread that may be waited for counts as a helper
_SOON_LIMITS = 5  # times the limit, or this many seconds
_SOON_SECONDS = 30.0
_EXPIRY_LIMITS = 2  # times the limit, or this many seconds
_EXPIRY_SECONDS = 5.0
_LONG_CALL_SECONDS = 600.0  # seconds, and this many times the limit, after which one call has taken very long
_LONG_CALL_LIMITS = 20
FETCHING = "torch/utils/data/_utils/fetch.py"


class Helper(NamedTuple):
    """Somebody who goes on. `known` is that the main thread waits for just that one."""

    name: str
    frame: PyFrame | None
    how: str
    sleeps: float | None
    known: bool
    uses_core: bool


def very_long(stall: Stall) -> bool:
    """Whether even long work should have ended."""
    return stall.still > max(_LONG_CALL_SECONDS, _LONG_CALL_LIMITS * stall.limit)


def native(process: ProcessView | None, thread: PyThread | None) -> ThreadView | None:
    """A thread of Python as the kernel sees it."""
    if process is None or thread is None:
        return None
    return process.main if thread.main else process.thread(thread.tid)


def demand(row: ThreadView | None) -> float:
    """The share of a core that a thread wants."""
    return (row.demand or row.busy or 0.0) if row is not None else 0.0


def sleeps(row: ThreadView | None) -> bool:
    return row is not None and row.syscall in SLEEPS


def sleep_left(row: ThreadView | None) -> float | None:
    """Seconds until a sleep ends, if a thread sleeps and that can be told."""
    return row.wakes_in if row is not None and sleeps(row) else None


def receives(row: ThreadView | None) -> bool:
    """Whether a thread that waits to read is given something now and then."""
    if row is None or row.syscall not in _RECEIVES:
        return False
    return (row.asleep is not None and row.asleep < _RECENT_SECONDS) or (row.wakes or 0.0) > 1 / _RECENT_SECONDS


def ends_soon(stall: Stall, left: float | None) -> bool:
    """Whether a sleep ends soon enough to be waited for: who sleeps for longer is as good as stuck."""
    return left is None or left <= max(_SOON_SECONDS, _SOON_LIMITS * stall.limit)


def expires_soon(stall: Stall, left: float) -> bool:
    """Whether a wait reaches its time limit soon; it may then end in nothing but an exception."""
    return left <= max(_EXPIRY_SECONDS, _EXPIRY_LIMITS * stall.limit)


def share(row: ThreadView | None) -> str:
    return f"{(row.busy or 0.0):.0%} of a core" if row is not None and row.busy is not None else ""


def frames_in(thread: PyThread | None, *parts: str) -> PyFrame | None:
    """The innermost frame of a thread in a file whose path contains one of these, other than by importing it."""
    frames = thread.frames if thread is not None else ()
    called = (frame for frame in frames if frame.function != "<module>")
    return next((frame for frame in called if any(part in frame.file for part in parts)), None)


def caller_of(thread: PyThread, callee: PyFrame) -> PyFrame | None:
    """The user's line that led to a frame."""
    at = thread.frames.index(callee)
    return next((frame for frame in thread.frames[at:] if frame.user), None) or thread.user_frame


def helpers(stall: Stall) -> Iterator[Helper]:
    """Threads and processes that go on and that the main thread may wait for; the known ones first."""
    main = stall.thread
    if main is None:
        return
    held = main.waits_for is not None and main.waits_for.kind in _HELD
    patient = stall.still < _STRANGER_LIMITS * stall.limit
    found = (*_threads(stall, main), *_children(stall))
    for helper in sorted(found, key=lambda helper: not helper.known):
        if helper.known or (not held and (helper.uses_core or patient)):
            yield helper


def _threads(stall: Stall, main: PyThread) -> Iterator[Helper]:
    inner = stall.inner
    for thread in inner.threads if inner is not None else ():
        row = native(stall.view, thread)
        if thread.main or (thread.user_frame is None and demand(row) < BUSY and not _is_timer(thread)):
            continue  # a monitor of some library
        name = f"thread `{thread.name}`" if thread.name else f"thread {thread.tid}"
        known = _is_awaited(thread, main)
        if demand(row) > BUSY:
            yield Helper(name, thread.user_frame, f"uses {share(row)}", None, known, True)
        elif thread.moved:
            yield Helper(name, thread.user_frame, "moves", None, known, False)
        elif row is not None and row.wakes_in is not None and _is_soon(stall, row):
            # Who waits with a time limit may do so again and again, for nothing.
            how = "sleeps" if sleeps(row) else "waits"
            words = f"{how} for {duration(row.wakes_in)} more"
            yield Helper(name, thread.user_frame, words, row.wakes_in, known and sleeps(row), False)
        elif row is not None and (row.wakes or 0.0) > _MIN_WAKES_PER_SECOND:
            # Always seen in the same short nap, and just not in it when the kernel was asked.
            yield Helper(name, thread.user_frame, f"wakes {row.wakes:.0f} times a second", 0.0, known, False)


def _is_soon(stall: Stall, row: ThreadView) -> bool:
    left = row.wakes_in or 0.0
    return ends_soon(stall, left) if sleeps(row) else expires_soon(stall, left)


def _is_timer(thread: PyThread) -> bool:
    """Whether this is a `threading.Timer` that waits for its time: nothing but frames of that module."""
    files = {frame.file.rpartition("/")[2] for frame in thread.frames}
    return files == {"threading.py"} and any(frame.function == "run" for frame in thread.frames)


def _is_awaited(thread: PyThread, main: PyThread) -> bool:
    wanted = main.waits_for
    if wanted is None:
        return False
    return wanted.owner == thread.ident or any(lock.identity == wanted.identity for lock in thread.holds)


def _children(stall: Stall) -> Iterator[Helper]:
    """Processes that the script has started: those that use a core, read or write, or sleep with an end."""
    main = stall.thread
    wanted = main.waits_for.kind if main is not None and main.waits_for is not None else ""
    for process in descendants(stall):
        if process.is_loader_worker or process.state in "ZXTt":
            continue
        inside = stall.inside.get(process.pid)
        thread = inside.main if inside is not None else None
        left = sleep_left(process.main)
        moved = max(process.bytes_read or 0.0, process.bytes_written or 0.0)
        if process.demand > BUSY:
            how, left = f"uses {(process.busy or 0.0):.0%} of a core", None
        elif moved > (MOVING if inside is not None else _MIN_UNASKED_BYTES_PER_SECOND):
            left = None
            how = f"reads and writes {moved / 1e6:.1f} MB/s"
        elif thread is not None and thread.moved:
            how, left = "moves", None
        elif left is not None and ends_soon(stall, left):
            how = f"sleeps for {duration(left)} more"
        else:
            continue
        frame = thread.user_frame if thread is not None else None
        name = f"process {process.pid}" if frame is not None else command(process, process.pid)
        yield Helper(name, frame, how, left, wanted == "child process", process.demand > BUSY)


def where(helper: Helper) -> str:
    """Somebody who goes on, in words."""
    place = f" at {short(helper.frame)}" if helper.frame is not None else ""
    return f"{helper.name}{place} {helper.how}"


def waits_for_workers(thread: PyThread | None) -> bool:
    """Whether a thread waits for what a DataLoader's workers send. Without workers it reads for itself."""
    frames = thread.frames if thread is not None else ()
    return any(frame.function in ("_try_get_data", "_get_data") and "dataloader.py" in frame.file for frame in frames)


def sleeps_for_long(stall: Stall, process: ProcessView) -> bool:
    """Whether a process sleeps for so long that it may as well be called stuck."""
    return not ends_soon(stall, sleep_left(process.main))


def works(stall: Stall, process: ProcessView, view: InsideView) -> str:
    """The sign that a process works on the data that it reads; empty if there is none."""
    thread, loop = view.main, view.loop
    if thread is None or view.by_signal:
        return "is at work" if demand(process.main) > BUSY else ""  # it could not answer
    if frames_in(thread, FETCHING) is None:
        return ""
    if loop is not None and loop.kind == "while" and (loop.endless or loop.unchanged):
        return ""  # it may never end: that is for others to say
    row = native(process, thread)
    left = sleep_left(row)
    if sleeps(row) and not sleeps_for_long(stall, process):
        return f"sleeps, for {duration(left)} more" if left is not None else "sleeps"
    if demand(row) > BUSY:
        return f"is at work ({share(row)})" if share(row) else "is at work"
    if (process.bytes_read or 0.0) > MOVING:
        return f"reads {size(int(process.bytes_read or 0))} a second"
    if receives(row):
        return "reads, and receives data from time to time"
    return "moves" if thread.moved else ""
