"""Several looks at a tree of processes from outside: /proc always, py-spy where it is installed."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import msgspec

from torchmedic.diagnose.words.stall import IDLE
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import BoxContents
from torchmedic.records.gpu import GpuHealth
from torchmedic.records.inside import InsideView
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Peer, Stall
from torchmedic.runfolder import files as run_files
from torchmedic.runfolder import layout
from torchmedic.settings import RUN_DIR_VARIABLE
from torchmedic.supervise.attach import targets
from torchmedic.supervise.attach.python_locks import with_locks
from torchmedic.supervise.attach.stacks import Stacks
from torchmedic.supervise.gpu.gpu_health import uses_gpu
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc import growing_files, libraries, outsiders, process, tree, waits
from torchmedic.supervise.proc.process import PROC
from torchmedic.supervise.proc.syscalls import RUNNING

SECONDS = 2.0
_LOOKS = 4
_MOST_STACKS = 32  # processes; those further up in the tree come first
_NOWHERE = Path("/proc")
_NVML = 1.5  # seconds that the driver of a GPU may take to answer


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that was seen: a stall for each process that trains, and why there are no Python stacks, if so.

    `unseen` are processes whose stacks are missing, while there are those of others.
    """

    stalls: tuple[Stall, ...] = ()
    processes: tuple[ProcessView, ...] = ()
    no_stacks: str = ""
    unseen: tuple[int, ...] = ()
    run: Path | None = None


def look(pid: int, *, seconds: float = SECONDS, native: bool = False) -> Seen:
    """Look at a process and its descendants for some seconds.

    Args:
        pid: The process.
        seconds: For how long.
        native: Whether py-spy may stop each process for a moment, to see frames of C.
    """
    begun = time.monotonic()
    before = tree.tree(pid)
    python = {view.pid for view in before if targets.is_python(view)}
    numbers = [view.pid for view in before]
    pressure = host_pressure.read(pid, numbers)
    files = growing_files.sizes(numbers, _NOWHERE)
    stacks = Stacks([view.pid for view in before if view.pid in python and not targets.is_helper(view)][:_MOST_STACKS])
    glances: list[dict[int, ProcessView]] = []
    for number in range(_LOOKS):
        _sleep_until(begun + seconds * number / (_LOOKS - 1))
        stacks.take(native=native and number == _LOOKS - 1)
        glances.append({each: view for each in python if (view := process.read(each)) is not None})
    after = waits.with_waits(tree.compare_all(before, tree.tree(pid)))
    after = growing_files.with_growth(after, files, growing_files.sizes(numbers, _NOWHERE))
    after = tuple(stacks.with_native(view) for view in after)
    later = host_pressure.read(pid, numbers)
    gpu = _gpus(frozenset(numbers)) if any(map(uses_gpu, numbers)) else None
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
        outsiders=outsiders.at_other_ends(after),
        above=outsiders.above(pid),
    )
    peers = [Peer(process=view, inside=inside.get(view.pid)) for view in trains]
    return Seen(
        stalls=tuple(_stall(common, view, after, inside, peers, _box(run, view.pid), glances) for view in trains),
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
    box: BoxContents | None,
    glances: list[dict[int, ProcessView]],
) -> Stall:
    """What was seen of one process that trains."""
    family = targets.below(view.pid, views)
    numbers = {each.pid for each in family}
    last = box.last if box is not None else None
    own = {number: found for number, found in inside.items() if number in numbers}
    family = tuple(
        msgspec.structs.replace(each, libraries=libraries.compilers(each.pid)) if each.pid == view.pid else each
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
        ended={each.pid: each.exit_status for each in family if each.exit_status is not None},
        mute=tuple(each.pid for each in family if each.pid in own and _is_mute(each, own[each.pid], glances)),
        peers=tuple(peer for peer in peers if peer.process.pid not in numbers),
    )


def asleep(family: tuple[ProcessView, ...]) -> float | None:
    """For how many seconds none of the main threads of these processes has run."""
    times = [
        view.main.asleep
        for view in family
        if view.main is not None and view.state not in "ZX" and not targets.is_helper(view)
    ]
    known = [each for each in times if each is not None]
    return min(known) if known and len(known) == len(times) else None


def _described(inner: InsideView, known: dict[int, ProcessView]) -> InsideView:
    """What of a process's account of itself can be told from outside."""
    view = known[inner.pid]
    return msgspec.structs.replace(inner, forked=_is_forked(view), job=targets.job_of(view))


def _is_forked(view: ProcessView) -> bool:
    """Whether it is a copy of its parent: then it has the addresses that the kernel chose for that."""
    own = _bytes(f"{PROC}/{view.pid}/auxv")
    return bool(own) and own == _bytes(f"{PROC}/{view.parent}/auxv")


def _bytes(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def _is_mute(view: ProcessView, inner: InsideView, glances: list[dict[int, ProcessView]]) -> bool:
    """Whether one thread kept the GIL in all looks, while it slept itself or others did nothing but ask for it.

    Python gives the GIL up before it waits for anything. Who asks for it sleeps in a futex for 5 ms, again and again.
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
    """Whether a thread was always in one and the same futex, or about to go back to it, and did no work in between."""
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


def _box(run: Path | None, pid: int) -> BoxContents | None:
    if run is None:
        return None
    folder = run_files.folder_of(run, pid)
    for each in [folder] if folder is not None else layout.process_folders(run):
        with contextlib.suppress(UnreadableRun):
            box = blackbox.read(each / run_files.BLACK_BOX)
            if box.pid == pid:
                return msgspec.structs.replace(box, moments=box.moments[-64:])
    return None


def _gpus(pids: frozenset[int]) -> GpuHealth | None:
    """What NVML says, asked in a thread: the driver of a GPU that is gone can take its time."""
    answers: list[GpuHealth] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            import pynvml

            from torchmedic.supervise.gpu.nvml import Gpus

            pynvml.nvmlInit()
            answers.append(Gpus(pynvml).read(pids))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_NVML)
    if not answers:
        return None
    # By which number the processes know a GPU is a matter of their environment, not of ours.
    gpus = tuple(msgspec.structs.replace(gpu, ordinal=None) for gpu in answers[0].gpus)
    return msgspec.structs.replace(answers[0], gpus=gpus)
