"""What holds memory, and which thread waits for which: bounded lists for the pictures and their tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec

from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.stall import Stall
from torchmedic.report.html.run_data import Autopsy
from torchmedic.source.user_code import relative

_MAX_BLOCKS = 12
_MIN_SHARE = 0.001  # share of a block that is named; the others are shown together
_MAX_LINES = 10
_MAX_WAITERS = 12
SAVED = "saved activations"


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of memory; `parts` add up to it."""

    name: str
    nbytes: int
    parts: tuple[Block, ...] = ()


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A thread that made no progress: its line, what it waits for, and the index of the waiter that holds it."""

    name: str
    place: str = ""
    code: str = ""
    waits_for: str = ""
    holds: tuple[str, ...] = ()
    target: int | None = None


def memory_split(autopsy: Autopsy, known: Collection[str] = (), *, lines: bool = True) -> Block | None:
    """What was in memory when it ran out: headings, and below saved activations the lines that saved them."""
    rows = sorted(((size, name) for name, size in autopsy.rows.items() if size > 0), reverse=True)
    whole = sum(size for size, _ in rows)
    if not whole:
        return None
    named = [row for row in rows if row[0] >= _MIN_SHARE * whole][:_MAX_BLOCKS]
    blocks = [
        Block(name=name, nbytes=size, parts=_saved_by_line(autopsy, size, known) if lines and name == SAVED else ())
        for size, name in named
    ]
    if rest := whole - sum(size for size, _ in named):
        blocks.append(Block(name="everything else", nbytes=rest))
    where = "of the process" if autopsy.where == "host" else f"on {autopsy.where}"
    return Block(name=f"memory {where}", nbytes=whole, parts=tuple(blocks))


def _saved_by_line(autopsy: Autopsy, size: int, known: Collection[str]) -> tuple[Block, ...]:
    """The lines, and the rest as one more part; none if the lines add up to more than the heading."""
    named = [line for line in autopsy.lines if line.nbytes > 0]
    named.sort(key=lambda line: line.nbytes, reverse=True)
    shown = [
        Block(
            name=f"{short_name(line.file, known)}:{line.line}" if line.file else "no line of yours", nbytes=line.nbytes
        )
        for line in named[:_MAX_LINES]
    ]
    rest = size - sum(block.nbytes for block in shown)
    if not shown or rest < 0:
        return ()
    return (*shown, Block(name="other lines", nbytes=rest)) if rest else tuple(shown)


def short_name(file: str, known: Collection[str]) -> str:
    """A file as the report names it: the page may be written in another working directory than that of the run."""
    return next((name for name in known if file.endswith(f"/{name}")), relative(file))


def waiters(stall: Stall, known: Collection[str] = ()) -> tuple[Waiter, ...]:
    """Every waiting Python thread; first those of the process that made no progress."""
    views = sorted(stall.inside.values(), key=lambda view: view.pid != stall.pid)
    found = [(view, thread) for view in views for thread in view.threads if _tells(thread)]
    found = list(itertools.islice(found, _MAX_WAITERS))
    return tuple(
        Waiter(
            name=_name(view, thread, stall),
            place=f"{short_name(frame.file, known)}:{frame.line}" if (frame := _frame(thread)) is not None else "",
            code=frame.code if frame is not None else "",
            waits_for=_wanted(thread),
            holds=tuple(lock.name or lock.kind for lock in thread.holds[:4]),
            target=_target(view, thread, found),
        )
        for view, thread in found
    )


def _tells(thread: PyThread) -> bool:
    return thread.main or thread.waits_for is not None or bool(thread.holds)


def _frame(thread: PyThread) -> PyFrame | None:
    return thread.user_frame or next(iter(thread.frames), None)


def _name(view: InsideView, thread: PyThread, stall: Stall) -> str:
    name = "main thread" if thread.main else f"thread {thread.name or thread.tid or thread.ident}"
    return name if view.pid == stall.pid and len(stall.inside) == 1 else f"{name} of process {view.pid}"


def _wanted(thread: PyThread) -> str:
    lock = thread.waits_for
    if lock is None:
        return f"the file {relative(thread.lock_file.path)}" if thread.lock_file is not None else ""
    return f"{lock.kind} {lock.name}".strip() if lock.name != lock.kind else lock.kind


def _target(view: InsideView, thread: PyThread, found: list[tuple[InsideView, PyThread]]) -> int | None:
    lock = thread.waits_for
    if lock is None:
        return None
    for number, (other_view, other) in enumerate(found):
        if other is thread:
            continue
        same = other_view.pid == view.pid
        if same and (other.ident == lock.owner or any(held.identity == lock.identity for held in other.holds)):
            return number
        if lock.process is not None and other_view.pid == lock.process and other.main:
            return number
    return None
