"""Several looks at a process tree from outside: through /proc, and through py-spy if it is installed."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import msgspec

from torchmedic.diagnose.words.stall import IDLE
from torchmedic.records.gpu import GpuHealth
from torchmedic.records.inside import InsideView
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Peer, Stall
from torchmedic.settings import RUN_DIR_VARIABLE
from torchmedic.supervise.attach import targets
from torchmedic.supervise.attach.python_locks import with_locks
from torchmedic.supervise.attach.stacks import Stacks
from torchmedic.supervise.boxes import recent_box_of
from torchmedic.supervise.gpu.gpu_health import uses_gpu
from torchmedic.supervise.gpu.nvml import connect
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import open_files, process, tree, waits
from torchmedic.supervise.proc.process import PROC
from torchmedic.supervise.proc.syscalls import RUNNING

SECONDS = 2.0  # from the first look to the last
_LOOKS = 4
_MAX_STACKS = 32  # processes whose stacks are read, ancestors first
_NO_RUN_FOLDER = Path("/proc")
_MAX_NVML_SECONDS = 1.5  # for an answer of the GPU driver


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all looks: a stall for each training process, and the reason if there are no Python stacks.

    `unseen` are processes whose stacks are missing although others were read.
    """

    stalls: tuple[Stall, ...] = ()
    processes: tuple[ProcessView, ...] = ()
    no_stacks: str = ""
    unseen: tuple[int, ...] = ()
    run: Path | None = None


def look(pid: int, *, seconds: float = SECONDS, native: bool = False) -> Seen:
    """Look at a process and its descendants for some seconds."""
    begun = time.monotonic()
    before = tree.tree(pid)
    python = {view.pid for view in before if targets.is_python(view)}
    numbers = [view.pid for view in before]
    pressure = host_pressure.read(pid, numbers)
    files = open_files.sizes(numbers, _NO_RUN_FOLDER)
    stacks = Stacks([view.pid for view in before if view.pid in python and not targets.is_helper(view)][:_MAX_STACKS])
    glances: list[dict[int, ProcessView]] = []
    for number in range(_LOOKS):
        _sleep_until(begun + seconds * number / (_LOOKS - 1))
        stacks.take(native=native and number == _LOOKS - 1)
        glances.append({each: view for each in python if (view := process.read(each)) is not None})
    after = waits.with_waits(tree.compare_all(before, tree.tree(pid)))
    after = open_files.with_growth(after, files, open_files.sizes(numbers, _NO_RUN_FOLDER))
    after = tuple(stacks.with_native(view) for view in after)
    later = host_pressure.read(pid, numbers)
    gpu = _gpus() if any(map(uses_gpu, numbers)) else None
    known = {view.pid: view for view in after}
    inside = {inner.pid: _described(inner, known) for inner in stacks.inside() if inner.pid in known}
    inside = with_locks(inside, known)
    trains = targets.training(after, python)
    run = next((found for view in trains if (found := _run_of(view.pid)) is not None), None)
    common = Stall(
        pid=0,
        still=time.monotonic() - begun,
        limit=seconds,
        attached=True,
        host=later,
        pressure=host_pressure.difference(pressure, later),
        gpu=gpu,
        outsiders=waits.at_other_ends(after),
        above=waits.above(pid),
    )
    peers = [Peer(process=view, inside=inside.get(view.pid)) for view in trains]
    return Seen(
        stalls=tuple(_stall(common, view, after, inside, peers, run, glances) for view in trains),
        processes=after,
        no_stacks=stacks.failure,
        unseen=tuple(pid for pid in stacks.unseen() if pid in known and known[pid].state not in "ZX"),
        run=run,
    )


def _stall(
    common: Stall,
    view: ProcessView,
    views: tuple[ProcessView, ...],
    inside: dict[int, InsideView],
    peers: list[Peer],
    run: Path | None,
    glances: list[dict[int, ProcessView]],
) -> Stall:
    """The stall of one training process."""
    box = recent_box_of(run, view.pid) if run is not None else None
    family = targets.below(view.pid, views)
    numbers = {each.pid for each in family}
    last = box.last if box is not None else None
    own = {number: found for number, found in inside.items() if number in numbers}
    family = tuple(
        msgspec.structs.replace(each, libraries=process.compilers(each.pid)) if each.pid == view.pid else each
        for each in family
    )
    return msgspec.structs.replace(
        common,
        pid=view.pid,
        rank=targets.rank_of(view) or 0,
        phase=last.phase if last is not None else "other",
        step=last.step if last is not None else 0,
        still=max(0.0, time.time() - last.time) if last is not None else max(common.still, asleep(family) or 0.0),
        box=box,
        processes=family,
        inside=own,
        mute=tuple(each.pid for each in family if each.pid in own and _is_mute(each, own[each.pid], glances)),
        peers=tuple(peer for peer in peers if peer.process.pid not in numbers),
    )


def asleep(family: tuple[ProcessView, ...]) -> float | None:
    """Seconds for which no main thread of these processes has run; None if unknown."""
    times = [
        view.main.asleep
        for view in family
        if view.main is not None and view.state not in "ZX" and not targets.is_helper(view)
    ]
    known = [each for each in times if each is not None]
    return min(known) if known and len(known) == len(times) else None


def _described(inner: InsideView, known: dict[int, ProcessView]) -> InsideView:
    """Add facts about a process that can be read from outside."""
    view = known[inner.pid]
    return msgspec.structs.replace(inner, forked=_is_forked(view), job=targets.job_of(view))


def _is_forked(view: ProcessView) -> bool:
    """Whether a process was forked without exec: it then has the same random addresses (auxv) as its parent."""
    own = _bytes(f"{PROC}/{view.pid}/auxv")
    return bool(own) and own == _bytes(f"{PROC}/{view.parent}/auxv")


def _bytes(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def _is_mute(view: ProcessView, inner: InsideView, glances: list[dict[int, ProcessView]]) -> bool:
    """Whether one thread held the GIL in all looks while it slept, or while others did nothing but ask for it.

    Python releases the GIL before every wait. A thread that asks for the GIL sleeps in a futex for 5 ms, repeatedly.
    """
    holder = [thread for thread in inner.threads if thread.holds_gil and len(thread.samples) > 1 and not thread.moved]
    if len(holder) != 1:
        return False
    own = view.thread(holder[0].tid)
    if own is not None and own.state == "S" and not own.wakes and own.syscall not in ("", "futex", RUNNING):
        return True
    others = (view.thread(thread.tid) for thread in inner.threads if not thread.holds_gil and not thread.moved)
    return any(row is not None and _asks(row, [each.get(view.pid) for each in glances]) for row in others)


def _asks(row: ThreadView, glances: list[ProcessView | None]) -> bool:
    """Whether a thread was in the same futex in all looks, or about to return to it, and did no work in between."""
    rows = [each.thread(row.tid) if each is not None else None for each in glances]
    calls = {(each.syscall, each.arguments[:1]) if each is not None else ("", ()) for each in rows} - {(RUNNING, ())}
    return (
        (row.busy or 0.0) < IDLE and bool(row.wakes) and len(calls) == 1 and all(call == "futex" for call, _ in calls)
    )


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _run_of(pid: int) -> Path | None:
    """The folder of the torchmedic run that a process belongs to."""
    for entry in (text(f"{PROC}/{pid}/environ") or "").split("\0"):
        if entry.startswith(f"{RUN_DIR_VARIABLE}="):
            return Path(entry.partition("=")[2])
    return None


def _gpus() -> GpuHealth | None:
    """The GPUs from NVML, asked in a thread, because the driver of a lost GPU may answer late."""
    answers: list[GpuHealth] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            gpus = connect()
            if gpus is not None:
                answers.append(gpus.read())

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_MAX_NVML_SECONDS)
    if not answers:
        return None
    # The CUDA number of a GPU depends on the environment of those processes, not on ours.
    gpus = tuple(msgspec.structs.replace(gpu, ordinal=None) for gpu in answers[0].gpus)
    return msgspec.structs.replace(answers[0], gpus=gpus)
