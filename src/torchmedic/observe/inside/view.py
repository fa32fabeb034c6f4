"""A process's own account of what each of its threads is doing, and of work that takes long by its nature."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from types import FrameType
from typing import Any

import torch

from torchmedic.contained import report_fault
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.failures import worker_failures
from torchmedic.observe.failures.sketch import plain
from torchmedic.observe.inside import loops
from torchmedic.observe.inside.deferred_logs import logged_at
from torchmedic.observe.inside.heartbeat import HEART
from torchmedic.observe.inside.lock_files import awaited_file
from torchmedic.observe.inside.locks import NOTIFICATION, held, waited_for
from torchmedic.observe.inside.other_threads import OTHERS
from torchmedic.observe.inside.peek import attribute, expression, is_between_rounds
from torchmedic.observe.step.tensors import bytes_in
from torchmedic.records.inside import EndedThread, InsideView, JobView, LoaderView, LockView, PyFrame, PyThread
from torchmedic.source.live_frames import position_of
from torchmedic.source.user_code import is_user_file
from torchmedic.source.user_variables import locals_of

LOOKS = 6  # at all threads, one after another
_INTERVAL_SECONDS = 0.2  # between two looks
_MAX_FRAMES = 60  # frames of a thread, the innermost ones
_JOINING = "init_process_group"
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_SAVING = os.path.join("torch", "serialization.py")
_MAX_COMPILES = 16  # the last ones


def looked_at(agent: ProcessContext, born: int | None, ended: tuple[EndedThread, ...] = ()) -> InsideView:
    """Look several times, a little apart, and tell what was seen.

    `born` is how many threads the parent had, if this process was forked; `ended` are the threads that have ended.
    """
    samples: dict[int, list[str]] = defaultdict(list)
    lines: dict[int, list[int]] = defaultdict(list)
    looks: list[loops.Look] = []
    main = threading.main_thread().ident
    batches, requests = agent.batches.number, agent.batches.requests
    for number in range(LOOKS):
        if number:
            time.sleep(_INTERVAL_SECONDS)
        beats = HEART.beats() and number > 0  # an answer to the first question may be as old as the last look
        for ident, frames in OTHERS.stacks().items():
            places = loops.places_of(frames)
            # A frame that came and went in between is as good as a movement: its identity tells. So is a jump: a loop
            # lets others run only there, and would be seen at the same place every time.
            runs = is_between_rounds(frames[0]) or (ident == main and beats)
            jump = f" jump {number}" if runs else ""
            samples[ident].append(" ".join(f"{place.frame:x}:{place.lasti}" for place in places) + jump)
            user = next((frame for frame in frames if is_user_file(frame.f_code.co_filename)), None)
            lines[ident].append(user.f_lineno if user is not None else 0)
            if ident == main:
                looks.append(loops.Look(places, loops.prints_of(frames)))
    stacks = OTHERS.stacks()
    loop = _contained(loops.view, looks, stacks.get(main or 0, []))
    return InsideView(
        pid=os.getpid(),
        time=time.time(),
        threads=tuple(
            _thread(ident, frames, tuple(samples[ident]), tuple(lines[ident]), main) for ident, frames in stacks.items()
        ),
        loaders=tuple(filter(None, (_contained(_loader, iterator, agent) for iterator in agent.batches.iterators()))),
        batches=agent.batches.number - batches,
        requests=agent.batches.requests - requests,
        torch_threads=torch.get_num_threads(),
        forked=born is not None,
        threads_at_fork=born,
        empty_loader=_contained(_batching, agent) or "",
        loop=loop,
        **(_contained(_work, stacks.get(main or 0, [])) or {}),
        ended_threads=ended,
        joining=_contained(_joining, stacks.get(main or 0, [])),
        item=_contained(_item, stacks.get(main or 0, [])) or "",
        logged=_contained(logged_at, stacks.get(main or 0, [])),
    )


def _thread(
    ident: int, frames: list[FrameType], samples: tuple[str, ...], lines: tuple[int, ...], main: int | None
) -> PyThread:
    known = threading._active.get(ident)  # type: ignore[attr-defined]
    waits = _contained(waited_for, frames)
    # Who waits to be notified has given the lock of the condition back meanwhile.
    given_back = waits.identity if isinstance(waits, LockView) and waits.kind == NOTIFICATION else 0
    locks = [lock for lock in _contained(held, frames) or [] if lock.identity != given_back]
    return PyThread(
        ident=ident,
        tid=getattr(known, "native_id", None) or 0,
        name=getattr(known, "name", ""),
        main=ident == main,
        daemon=getattr(known, "daemon", True),
        frames=tuple(_frame(frame) for frame in _telling(frames)),
        waits_for=waits if isinstance(waits, LockView) else None,
        holds=tuple(locks),
        samples=samples,
        lines=lines,
        lock_file=_contained(awaited_file, frames),
    )


def _telling(frames: list[FrameType]) -> list[FrameType]:
    """The innermost frames, and of the others the user's: a compiler stands deep below the line that called it."""
    return frames[:_MAX_FRAMES] + [each for each in frames[_MAX_FRAMES:] if is_user_file(each.f_code.co_filename)]


def _frame(frame: FrameType) -> PyFrame:
    line, end_line, column, end_column = position_of(frame.f_code, frame.f_lasti)
    user = is_user_file(frame.f_code.co_filename)
    if column is None or end_column is None or line != end_line:
        column = end_column = 0
    return PyFrame(
        file=frame.f_code.co_filename,
        line=frame.f_lineno or 0,
        function=frame.f_code.co_name,
        user=user,
        column=column + 1,
        end_column=end_column + 1,
        code=expression(frame)[0].strip()[:200] if user else "",
    )


def _loader(iterator: Any, agent: ProcessContext) -> LoaderView | None:
    processes = list(getattr(iterator, "_workers", ()))
    if not processes:
        return None
    drawn = agent.batches.under_way(iterator)
    given: list[tuple[str, ...]] = []
    for number in range(len(processes)):
        tasks = sorted(
            index for index, task in list(iterator._task_info.items()) if len(task) == 1 and task[0] == number
        )
        items = [drawn[index] for index in tasks if index in drawn]
        flat = [item for batch in items for item in (batch if isinstance(batch, list | tuple) else [batch])]
        given.append(tuple(str(plain(item)) for item in flat if item is not None)[:64])
    return LoaderView(workers=tuple(process.pid for process in processes), given=tuple(given))


def _batching(agent: ProcessContext) -> str:
    """How the loader that was asked last makes its batches."""
    iterator = agent.batches.asked() if agent.batches.asked is not None else None
    sampler = attribute(iterator, "_index_sampler")
    size, drop = attribute(sampler, "batch_size"), attribute(sampler, "drop_last")
    if type(size) is not int or type(drop) is not bool:
        return ""
    dataset = attribute(iterator, "_dataset")
    length = len(dataset) if isinstance(dataset, torch.utils.data.TensorDataset | torch.utils.data.Subset) else None
    known = f", its dataset has {length} items" if length is not None else ""
    return f"it makes batches of {size} with drop_last={drop}{known}"


def _item(frames: list[FrameType]) -> str:
    """Which item of the dataset a worker is reading."""
    index = worker_failures.index_under_way(frames)
    return "" if index is None else str(plain(index))


def _contained(question: Any, *arguments: Any) -> Any:
    """Answer one question; a failure is reported and does not keep the others from being answered."""
    try:
        return question(*arguments)
    except Exception as error:
        report_fault(f"observe.inside.{question.__name__}", error)
        return None


def _work(frames: list[FrameType]) -> dict[str, Any]:
    """Fields of `InsideView`; `frames` are those of the main thread."""
    return {
        "compiles": _compiles(),
        "state_bytes": _state_bytes(frames),
        "tunes": bool(torch.backends.cudnn.benchmark),
        "job": _job(),
    }


def _compiles() -> tuple[float, ...]:
    """How long earlier compilations of torch.compile took, in seconds."""
    known = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    for name in ("_compile.compile_inner", "_compile"):
        if name in known:
            return tuple(float(seconds) for seconds in list(known[name])[-_MAX_COMPILES:])
    return ()


def _job() -> JobView | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return JobView(
        backend=str(distributed.get_backend()), rank=distributed.get_rank(), world_size=distributed.get_world_size()
    )


def _joining(frames: list[FrameType]) -> JobView | None:
    """The job whose other ranks `init_process_group` waits for: its arguments, or the launcher's variables."""
    for frame in frames:
        if frame.f_code.co_name == _JOINING and frame.f_code.co_filename.endswith(_C10D):
            given = dict(locals_of(frame))
            rank, world, backend = given.get("rank"), given.get("world_size"), given.get("backend")
            own = int(os.environ.get("RANK", "-1")) if rank in (None, -1) else rank
            size = int(os.environ.get("WORLD_SIZE", "-1")) if world in (None, -1) else world
            if isinstance(own, int) and isinstance(size, int) and size > 0 and own >= 0:
                return JobView(backend=str(backend or ""), rank=own, world_size=size)
    return None


def _state_bytes(frames: list[FrameType]) -> int | None:
    """The size of what `torch.save` was given."""
    for frame in frames:
        if frame.f_code.co_name == "save" and frame.f_code.co_filename.endswith(_SAVING):
            known = dict(locals_of(frame))
            return bytes_in(known.get("obj"))
    return None
