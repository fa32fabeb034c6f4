"""The processes of a run that were killed by a signal or failed unnoticed, and the facts about them from outside."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from torchmedic.detect.failures.death import REQUESTED, fatal_signal, read_stacks, signal_name
from torchmedic.diagnose.registry import is_fallback, is_silent
from torchmedic.records import BoxContents, Diagnosis
from torchmedic.records.death import Death
from torchmedic.records.memory import HeldMemory
from torchmedic.runfolder import events, files, layout, questions
from torchmedic.runfolder.events import DeathLine, ExceptionLine, LostRankLine, RaisedLine, StartLine
from torchmedic.supervise import ranks
from torchmedic.supervise.boxes import read_box
from torchmedic.supervise.host import postmortem
from torchmedic.supervise.host.host_pressure import shared_memory
from torchmedic.supervise.host.memory_guard import holders
from torchmedic.supervise.host.watch import HostWatch

_MAX_SAMPLES = 40  # samples of the host's memory, before the end

# Exceptions that only report the failure of another process.
ECHOES = ("CalledProcessError", "BrokenProcessPool", "ChildFailedError", "ProcessExitedException")


class Traces(msgspec.Struct):
    """What the processes of a run have written to their folders."""

    run: Path
    folders: dict[int, Path]
    boxes: dict[int, BoxContents]
    stacks: dict[int, Path]
    told: dict[int, DeathLine]
    lost_a_rank: set[int]
    raised: bool = False  # in a job of several ranks: an exception has ended a process

    @property
    def known(self) -> set[int]:
        """Processes that had imported torch."""
        return self.boxes.keys() | self.stacks.keys()


def read_traces(run: Path, folders: list[Path]) -> Traces:
    others = {pid for folder in layout.process_folders(run) if folder not in folders for pid in _pids(folder)}
    stacks = {pid: path for pid, path in files.stack_files(run).items() if pid not in others}  # not of other ranks
    left = Traces(run, {}, {}, stacks, {}, set())
    for folder in folders:
        box = read_box(folder)
        if box is not None:
            left.boxes[box.pid] = box
            left.folders[box.pid] = folder
        lines = events.read_events(folder)
        left.told |= {line.pid: line for line in lines if isinstance(line, DeathLine)}
        left.raised |= any(isinstance(line, RaisedLine) for line in lines)
        if any(isinstance(line, LostRankLine) for line in lines):
            left.lost_a_rank |= {line.pid for line in lines if isinstance(line, StartLine)}
    return left


def _pids(folder: Path) -> list[int]:
    return [line.pid for line in events.events_of(folder, "start", StartLine)]


def find(
    left: Traces, host: HostWatch, pid: int, status: int, *, through_shell: bool, requested: bool = True
) -> list[Death]:
    """The deaths that are the root of how the run ended.

    Args:
        left: What the processes wrote.
        host: What was seen during the run.
        pid: The process that torchmedic started.
        status: Its wait status.
        through_shell: Whether it may be a shell or a launcher, which reports a signal of its child as 128 + N.
        requested: Whether SIGTERM is an end that was asked for, and no incident.
    """
    if status == 0:
        return []  # the run recovered from the death
    signals = _signals(left, host, pid, status, through_shell=through_shell)
    spoken = {
        number
        for number, folder in left.folders.items()
        for found in [files.read_diagnoses(folder).values()]
        if any(each.severity == "error" and not is_silent(each) for each in found)
    }
    asked = REQUESTED if requested else REQUESTED - {"SIGTERM"}
    dead = sorted(
        (number for number, name in signals.items() if name not in asked and number not in spoken),
        key=lambda number: _when(left, number),
    )
    # One death leads to others. Only processes that died by the same signal as the first are no echoes.
    return [_death(left, host, number, signals[number], pid) for number in dead if signals[number] == signals[dead[0]]]


def _signals(left: Traces, host: HostWatch, pid: int, status: int, *, through_shell: bool) -> dict[int, str]:
    """The signal that killed each process, from the most reliable source for each."""
    found: dict[int, str] = {}
    # Before it has imported torch, only a process that torchmedic itself has started is known.
    is_known = pid in left.known or (not through_shell and status == -signal.SIGKILL)
    if status < 0 and is_known and (name := signal_name(status)) is not None:
        return {pid: name}
    for number, path in left.stacks.items():
        name = fatal_signal(read_stacks(path)[0])
        if name is not None:
            found[number] = name
    for number, line in left.told.items():
        found.setdefault(number, line.signal)
    if found:
        return found
    if _only_echoes(left):
        for number in left.known:
            ended = host.ended.get(number, 0)
            if ended < 0 and (name := signal_name(ended)) is not None:
                found[number] = name
    if not found and through_shell and (name := signal_name(status)) is not None:
        unclean = [number for number, box in left.boxes.items() if not box.clean_exit and number not in host.ended]
        found.update(dict.fromkeys(unclean[:1], name))
    return found


def _only_echoes(left: Traces) -> bool:
    """Whether no process failed by itself. A process that did may have killed its children before it ended."""
    said = [
        found
        for number, folder in left.folders.items()
        if number not in left.lost_a_rank
        for found in files.read_diagnoses(folder).values()
    ]
    return all(found.severity != "error" or any(kind in found.message for kind in ECHOES) for found in said)


def _when(left: Traces, pid: int) -> float:
    with contextlib.suppress(KeyError, OSError):
        if (stat := left.stacks[pid].stat()).st_size:
            return stat.st_mtime
    box = left.boxes.get(pid)
    return box.last.time if box is not None and box.last is not None else time.time()


def _death(left: Traces, host: HostWatch, pid: int, name: str, script: int) -> Death:
    _, threads = read_stacks(left.stacks[pid]) if pid in left.stacks else ("", ())
    told = left.told.get(pid)
    shared = shared_memory()
    limits = postmortem.memory_limits()
    ram, swap = postmortem.host_memory()
    return Death(
        pid=pid,
        rank=ranks.rank_of(left.folders[pid]) if pid in left.folders else 0,
        part=told.part if told is not None else "script" if pid == script or pid in left.boxes else "child",
        signal=name,
        ended=time.time(),
        box=left.boxes.get(pid),
        threads=threads,
        surfaced=told.at if told is not None else None,
        sender=_sender(left.boxes.get(pid)),
        oom_kills=host.oom_kills,
        host_oom_kills=host.host_oom_kills,
        kernel_lines=postmortem.kernel_log(pid, host.started) if name == "SIGKILL" else (),
        memory_limit=limits.limit,
        memory_high=limits.high,
        memory_peak=limits.peak,
        limit_hits=host.limit_hits,
        peak_rss=postmortem.peak_rss_of_children(),
        host_memory=ram,
        swap_free=swap,
        shm_low=host.shm_low,
        shm_size=shared[0] if shared is not None else None,
        samples=host.guard.samples[-_MAX_SAMPLES:],
        holders=_holders(left, pid),
    )


def _sender(box: BoxContents | None) -> str:
    """The name of the process that sent the last signal, if it still lives."""
    if box is None or box.signal is None or not box.signal.pid:
        return ""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{box.signal.pid}/comm").read_text().strip()
    return ""


def _holders(left: Traces, pid: int) -> tuple[HeldMemory, ...]:
    told = left.told.get(pid)
    is_worker = told is not None and told.part == "worker"
    folder = left.folders.get(pid) or events.worker_folder_of(left.run, pid, is_worker=is_worker)
    # Another worker, which does the same work, may have been asked later. The first process of a rank does other work.
    trainers = {number for number, each in left.folders.items() if "." not in each.name}
    others = questions.holders_known(left.run) - trainers if is_worker else ()
    asked = (found for each in (pid, *others) if (found := questions.read_held(left.run, each)))
    most = max(asked, key=lambda found: found[0].nbytes, default=())
    return most or (holders(folder) if folder is not None else ())


def unnoticed_failure(folders: list[Path]) -> Diagnosis | None:
    """A warning about the first child that died, if any did. Explained failures have been reported already."""
    names, first = [], None
    for folder in folders:
        name = next((line.child for line in events.read_events(folder) if isinstance(line, ExceptionLine)), "")
        found = [each for each in files.read_diagnoses(folder).values() if is_fallback(each)]
        if name and found:
            names.append(name)
            first = first or found[0]
    if first is None:
        return None
    others = f"{len(names)} children of the script died of an exception: {', '.join(names[:8])}"
    return replace(
        first,
        severity="warning",
        grade="proven",
        message=f"the child process `{names[0]}` died of an exception, and the script went on to end well",
        evidence=(*first.evidence, *([others] if len(names) > 1 else [])),
        in_traceback=False,
    )
