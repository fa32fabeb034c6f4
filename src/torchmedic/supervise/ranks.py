"""The ranks of a job, as their folders show them: what each called last, and what became of it."""

from __future__ import annotations

import builtins
import contextlib
import os
import time
from collections.abc import Container
from pathlib import Path

import msgspec

from torchmedic.detect.failures.death import fatal_signal, read_stacks
from torchmedic.detect.ranks import alignment, culprit, messages
from torchmedic.detect.ranks.logged_by_some import with_logging_line
from torchmedic.diagnose.registry import is_silent
from torchmedic.errors import UnreadableRun
from torchmedic.records import BoxContents, Diagnosis, StackFrame
from torchmedic.records.rank_facts import RankFacts
from torchmedic.records.ranks import (
    MARKS,
    Collective,
    Difference,
    Fate,
    HandledException,
    Job,
    Leaving,
    RankLog,
    RankState,
)
from torchmedic.runfolder import events, files, layout, questions, reading, ring
from torchmedic.supervise import remote_ranks
from torchmedic.supervise.boxes import micro_steps_of, read_box
from torchmedic.supervise.fatal_calls import with_fatal_call
from torchmedic.supervise.proc import process

_EXPLANATION_SECONDS = 3.5  # that the parent of a rank gets to explain it, from the limit for a stall on
_MAX_ENDING_SECONDS = 2.0
_MAX_NOTING_SECONDS = 1.0  # between the note of a call and that of the exception which is handled in it
_SPEAKER = ".speaker"  # there as soon as the parent of one rank speaks for all


def rank_of(folder: Path) -> int:
    """The rank of a process: the one it has in its job, else that of its folder.

    The folder of a process that has no launcher (`mp.spawn`) has its name before the process joins the job.
    """
    with contextlib.suppress(UnreadableRun):
        return ring.read_rank(folder / ring.FILE)
    return layout.rank_of(folder)


def read_job(run: Path, *, still: float = 0.0, exited: Container[int] = ()) -> Job | None:
    """All ranks that have called a collective; None if fewer than two have.

    `exited` are processes that no signal has ended: they left the job by themselves.
    """
    folders = layout.process_folders(run)
    first = min(filter(None, map(_raised, folders)), default=0.0)
    states = [state for folder in folders if (state := _state(run, folder, first, exited)) is not None]
    states = [with_fatal_call(run, state, states) for state in states]
    states += remote_ranks.elsewhere(run, {state.rank for state in states})
    logs = [state.log for state in states if state.log is not None]
    world = max((log.world_size for log in logs), default=0)
    if len(logs) < 2 or world < 2:
        return None
    difference = alignment.first_difference(logs)
    unequal = messages.unequal_message(logs)
    if unequal is not None and (difference is None or difference.kind == "stopped"):  # who is aborted calls no more
        difference = unequal
    elif difference is not None:
        difference = culprit.named(_with_logging_lines(difference, states), states)
    return Job(
        world_size=world,
        ranks=tuple(sorted(states, key=lambda state: state.rank)),
        difference=difference,
        unmatched=tuple(messages.unmatched(logs)),
        step=max((state.updates for state in states), default=None),
        still=still,
    )


def _raised(folder: Path) -> float:
    """The time of the exception that ended a rank; 0 if it only tells of the loss of another rank."""
    lines = (line for line in events.read_events(folder) if isinstance(line, events.RaisedLine))
    return next((line.time for line in lines if not line.lost), 0.0)


def _state(run: Path, folder: Path, until: float = 0.0, exited: Container[int] = ()) -> RankState | None:
    log = _log(folder)
    if log is None:
        return None
    box = read_box(folder)
    answer = questions.read_answer(run, log.pid)
    main = answer.main if answer is not None else None
    frames = [frame for frame in main.frames if frame.user] if main is not None else []
    skipped = culprit.forward_without_backward(log)
    fate, signal = _fate(run, folder, log.pid, box)
    if fate == "died" and not signal and log.pid in exited:
        fate = "ended"
    facts = read_facts(folder)
    return RankState(
        rank=log.rank,
        fate=fate,
        signal=signal,
        log=log,
        at=tuple(StackFrame(file=frame.file, line=frame.line, function=frame.function) for frame in frames),
        updates=box.last.updates if box is not None and box.last is not None else 0,
        micro_steps=micro_steps_of(box) if box is not None else 0,
        moved=box.last.time if box is not None and box.last is not None else 0.0,
        skipped=next(iter(skipped.frames), None) if skipped is not None else None,
        raised=_raised(folder),
        seen=_seen(box, until),
        handles=_handled(folder, log),
        logged=answer.logged if answer is not None else None,
        left=_left(folder),
        dealt=facts.loading if facts is not None and facts.sampler == "DistributedSampler" else None,
        stream=facts.stream if facts is not None else None,
    )


def _with_logging_lines(difference: Difference, states: list[RankState]) -> Difference:
    """The difference with the line that logged a value as the innermost line of a call which exchanges this value.

    What the library does in between is the same for all values. Only the last call of a rank is known to come from
    this line, so that the logs are compared without it.
    """
    places = {state.log.calls[-1]: state.logged for state in states if state.logged and state.log and state.log.calls}

    def placed(call: Collective) -> Collective:
        line = places.get(call)
        return msgspec.structs.replace(call, frames=(line, *call.frames) if line else call.frames, library=())

    both = {"call": difference.call, "expected": difference.expected}
    if not any(call in places for call in both.values()):
        return with_logging_line(difference)
    return msgspec.structs.replace(difference, **{name: call and placed(call) for name, call in both.items()})


def _handled(folder: Path, log: RankLog) -> HandledException | None:
    """The exception that a rank handled when it made its last call."""
    last = next((call for call in reversed(log.calls) if not call.native and call.op not in MARKS), None)
    with contextlib.suppress(OSError, msgspec.DecodeError):
        told = reading.decode(reading.read(folder / files.HANDLED), HandledException)
        return told if last is not None and 0.0 <= told.time - last.time < _MAX_NOTING_SECONDS else None
    return None


def _left(folder: Path) -> Leaving | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return reading.decode(reading.read(folder / files.LEAVING), Leaving)
    return None


def read_facts(folder: Path) -> RankFacts | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return reading.decode(reading.read(folder / files.RANK_FACTS), RankFacts)
    return None


def _seen(box: BoxContents | None, until: float) -> StackFrame | None:
    moments = [each for each in box.moments if each.file and each.time <= until] if box is not None else []
    return StackFrame(file=moments[-1].file, line=moments[-1].line, function="") if moments else None


def _log(folder: Path) -> RankLog | None:
    """What the process wrote down itself, if it is not older than its ring; else the ring."""
    with contextlib.suppress(UnreadableRun):
        own = ring.read(folder / ring.FILE)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            told = reading.decode(reading.read(folder / files.RANK_LOG), RankLog)
            newest = max((call.time for call in told.calls), default=0.0)
            if told.pid == own.pid and not (own.calls and own.calls[-1].time > newest):
                return told
        return own
    return None


def _fate(run: Path, folder: Path, pid: int, box: BoxContents | None) -> tuple[Fate, str]:
    view = process.read(pid)
    if view is not None and view.state not in "ZX":
        return "running", ""
    stacks = files.stack_files(run).get(pid)
    signal = fatal_signal(read_stacks(stacks)[0]) if stacks is not None else None
    if signal is not None:
        return "died", signal
    raised = events.ExceptionLine | events.LostRankLine | events.RaisedLine
    if any(isinstance(line, raised) for line in events.read_events(folder)):
        return "raised", ""
    if any(found.severity == "error" for found in files.read_diagnoses(folder).values()):
        return "raised", ""
    has_ended = (box is not None and box.clean_exit) or files.ended_well(run, layout.rank_of(folder))
    return ("ended", "") if has_ended else ("died", "")


def verdict(run: Path, *, still: float = 0.0, only_met: bool = False, exited: Container[int] = ()) -> Diagnosis | None:
    """Why the job has failed or stands still, if its ranks went different ways.

    `only_met`: only where the ranks have met in calls that do not fit; one that has made no call may still come.
    """
    from torchmedic.diagnose import registry
    from torchmedic.diagnose.engine import ask

    job = read_job(run, still=still, exited=exited)
    if job is None:
        return None
    difference = job.difference
    if only_met and (difference is None or difference.call is None or difference.expected is None):
        return None
    return ask(job, registry.RANKS)


def last_verdict(run: Path, exited: Container[int] = ()) -> Diagnosis | None:
    """The verdict after the end of a rank. The other ranks are waited for: they end soon, and know more then.

    A rank that goes on was asked where it is; its answer is waited for, too.
    """
    end = time.monotonic() + _MAX_ENDING_SECONDS
    while (job := read_job(run)) is not None and time.monotonic() < end + _MAX_ENDING_SECONDS:
        running = [state for state in job.ranks if state.fate == "running"]
        if not running or (time.monotonic() > end and all(state.at for state in running)):
            break
        time.sleep(0.1)
    return verdict(run, exited=exited)


def is_explained(run: Path, rank: int) -> bool:
    """Whether the parent of another rank has told an error."""
    return any(not is_silent(found) for found in files.errors_of_others(run, rank))


def seconds_to_explain(run: Path, rank: int, still: float, limit: float) -> float:
    """For how long the parent of another rank, which does not come to its next call, may still tell why.

    A rank that went on for longer than this one is examined later, too. Without an explanation, the wait is told.
    """
    job = read_job(run)
    difference = job.difference if job is not None else None
    if job is None or difference is None or difference.kind != "stopped" or rank in difference.culprits:
        return 0.0
    late = [state for each in difference.culprits if (state := job.of(each)) is not None]
    if not late or any(state.fate != "running" for state in late):
        return 0.0
    longer = max(state.moved for state in late) - (time.time() - still)
    return max(0.0, limit + min(max(longer, 0.0), limit) + _EXPLANATION_SECONDS - still)


def is_raised_in_call(run: Path, diagnosis: Diagnosis) -> bool:
    """Whether an exception came out of the last call of a rank, which waits for others, and not out of its own code.

    It may also tell of the end of a rank.
    """
    if diagnosis.cause.startswith(("ProcessExitedException", "ChildFailedError")):
        return True  # `mp.spawn`, or torchrun, tells that a rank has ended
    kind: object = getattr(builtins, diagnosis.cause.partition(":")[0], None)
    if isinstance(kind, type) and not issubclass(kind, RuntimeError | OSError):
        return False  # a call that waits raises no such thing
    place = diagnosis.cause_location
    logs = [log for folder in layout.process_folders(run) if (log := _log(folder)) is not None]
    last = next((log.calls[-1] for log in logs if log.rank == diagnosis.rank and log.calls), None)
    if place is None or last is None:
        return last is not None
    return any(frame.line == place.line and frame.file.endswith(place.file) for frame in last.frames)


def is_broken(run: Path) -> bool:
    """Whether a rank of the job has been killed or has failed."""
    found = [state for folder in layout.process_folders(run) if (state := _state(run, folder)) is not None]
    return any(state.fate in ("raised", "died") for state in found)


def give_back(run: Path) -> None:
    """The job went on: whoever finds it standing still again may speak."""
    with contextlib.suppress(OSError):
        (run / _SPEAKER).unlink()


def is_told(run: Path, code: str) -> bool:
    """Whether a parent has told a finding about all ranks."""
    return (run / f"{_SPEAKER}-{code}").exists()


def claim(run: Path, code: str = "") -> bool:
    """Whether this parent is the one to speak for the job, or to tell one finding; the first to ask is.

    Asked again about the job, the same parent still is; a finding is told once.
    """
    path = run / (f"{_SPEAKER}-{code}" if code else _SPEAKER)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        return True
    with contextlib.suppress(OSError):
        return not code and path.read_text() == str(os.getpid())
    return False
