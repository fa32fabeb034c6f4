"""Which processes of a run have died of a signal, and everything that can be known about it from outside."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from torchmedic.detect.failures.death import REQUESTED, fatal_signal, read_stacks, signal_name
from torchmedic.diagnose.registry import is_silent
from torchmedic.errors import UnreadableRun
from torchmedic.observe.step import blackbox
from torchmedic.records import BoxContents
from torchmedic.records.death import Death
from torchmedic.records.memory import HeldMemory
from torchmedic.runfolder import files, layout, questions
from torchmedic.runfolder.files import DeathLine, LostRankLine, StartLine
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.host.memory_guard import holders
from torchmedic.supervise.host.watch import Vigil

_SAMPLES = 40  # of the host's memory, before the end

# Exceptions that say no more than that another process has failed.
_NEWS = ("CalledProcessError", "BrokenProcessPool", "ChildFailedError", "ProcessExitedException")


class Left(msgspec.Struct):
    """What the processes of a run have left behind in their folders."""

    run: Path
    folders: dict[int, Path]
    boxes: dict[int, BoxContents]
    stacks: dict[int, Path]
    told: dict[int, DeathLine]
    lost_a_rank: set[int]

    @property
    def known(self) -> set[int]:
        """Processes that had imported torch."""
        return self.boxes.keys() | self.stacks.keys()


def read_left(run: Path, folders: list[Path]) -> Left:
    left = Left(run, {}, {}, files.stack_files(run), {}, set())
    for folder in folders:
        with contextlib.suppress(UnreadableRun):
            box = blackbox.read(folder / files.BLACK_BOX)
            left.boxes[box.pid] = box
            left.folders[box.pid] = folder
        lines = files.read_events(folder)
        left.told |= {line.pid: line for line in lines if isinstance(line, DeathLine)}
        if any(isinstance(line, LostRankLine) for line in lines):
            left.lost_a_rank |= {line.pid for line in lines if isinstance(line, StartLine)}
    return left


def find(left: Left, vigil: Vigil, pid: int, status: int, *, through_shell: bool) -> list[Death]:
    """The deaths that are the root of how the run ended.

    Args:
        left: What the processes left behind.
        vigil: What was seen while they ran.
        pid: The process that we started.
        status: Its wait status.
        through_shell: Whether it may be a shell or a launcher, which reports a signal of its child as 128 + N.
    """
    if status == 0:
        return []  # whatever died, the run got over it
    signals = _signals(left, vigil, pid, status, through_shell=through_shell)
    spoken = {
        number
        for number, folder in left.folders.items()
        for found in [files.read_diagnoses(folder).values()]
        if any(each.severity == "error" and not is_silent(each) for each in found)
    }
    dead = sorted(
        (number for number, name in signals.items() if name not in REQUESTED and number not in spoken),
        key=lambda number: _when(left, number),
    )
    # Where one process dies, others follow: of the rest only those that died in the same way are no echoes.
    return [_death(left, vigil, number, signals[number], pid) for number in dead if signals[number] == signals[dead[0]]]


def _signals(left: Left, vigil: Vigil, pid: int, status: int, *, through_shell: bool) -> dict[int, str]:
    """Who died of which signal, by the surest word there is for each."""
    found: dict[int, str] = {}
    if status < 0 and pid in left.known and (name := signal_name(status)) is not None:
        return {pid: name}
    for number, path in left.stacks.items():
        name = fatal_signal(read_stacks(path)[0])
        if name is not None:
            found[number] = name
    for number, line in left.told.items():
        found.setdefault(number, line.signal)
    if found:
        return found
    if _nothing_but_news(left):
        for number in left.known:
            ended = vigil.ended.get(number, 0)
            if ended < 0 and (name := signal_name(ended)) is not None:
                found[number] = name
    if not found and through_shell and (name := signal_name(status)) is not None:
        unclean = [number for number, box in left.boxes.items() if not box.clean_exit and number not in vigil.ended]
        found.update(dict.fromkeys(unclean[:1], name))
    return found


def _nothing_but_news(left: Left) -> bool:
    """Whether no process has failed by itself. One that has may well kill its children before it ends."""
    said = [
        found
        for number, folder in left.folders.items()
        if number not in left.lost_a_rank
        for found in files.read_diagnoses(folder).values()
    ]
    return all(found.severity != "error" or any(kind in found.message for kind in _NEWS) for found in said)


def _when(left: Left, pid: int) -> float:
    with contextlib.suppress(KeyError, OSError):
        if (stat := left.stacks[pid].stat()).st_size:
            return stat.st_mtime
    box = left.boxes.get(pid)
    return box.last.time if box is not None and box.last is not None else time.time()


def _death(left: Left, vigil: Vigil, pid: int, name: str, script: int) -> Death:
    fatal, threads = read_stacks(left.stacks[pid]) if pid in left.stacks else ("", ())
    told = left.told.get(pid)
    limits = postmortem.memory_limits()
    ram, swap = postmortem.host_memory()
    return Death(
        pid=pid,
        rank=layout.rank_of(left.folders[pid]) if pid in left.folders else 0,
        part=told.part if told is not None else "script" if pid == script or pid in left.boxes else "child",
        signal=name,
        ended=time.time(),
        box=left.boxes.get(pid),
        threads=threads,
        fatal_line=fatal,
        surfaced=told.at if told is not None else None,
        oom_kills=vigil.oom_kills,
        host_oom_kills=vigil.host_oom_kills,
        kernel_lines=postmortem.kernel_log(pid, vigil.started) if name == "SIGKILL" else (),
        memory_limit=limits.limit,
        memory_high=limits.high,
        memory_peak=limits.peak,
        limit_hits=vigil.limit_hits,
        peak_rss=postmortem.peak_rss_of_children(),
        host_memory=ram,
        swap_free=swap,
        shm_free=postmortem.shm_free(),
        shm_low=vigil.shm_low,
        shm_size=postmortem.shm_size(),
        core_pattern=postmortem.core_pattern(),
        samples=vigil.guard.samples[-_SAMPLES:],
        holders=_holders(left, pid),
    )


def _holders(left: Left, pid: int) -> tuple[HeldMemory, ...]:
    told = left.told.get(pid)
    is_worker = told is not None and told.part == "worker"
    folder = left.folders.get(pid) or files.worker_folder_of(left.run, pid, is_worker=is_worker)
    # A worker that is alike may have been asked later; the first process of a rank is not alike.
    trainers = {number for number, each in left.folders.items() if "." not in each.name}
    others = questions.holders_known(left.run) - trainers if is_worker else ()
    asked = (found for each in (pid, *others) if (found := questions.read_held(left.run, each)))
    most = max(asked, key=lambda found: found[0].nbytes, default=())
    return most or (holders(folder) if folder is not None else ())
