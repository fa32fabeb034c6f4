"""Which call of a job of several ranks a process waits in, and what the other ranks do meanwhile."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

from torchmedic.diagnose.rules.hangs._at_work import caller_of, demand, frames_in, native, sleeps
from torchmedic.diagnose.words.stall import BUSY, stands
from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Peer, Stall

State = Literal["waits", "behind", "ahead", "stands", "unknown"]

JOINING = "init_process_group"
_JOINING = ("init_process_group", "_create_c10d_store", "_tcp_rendezvous_handler", "_env_rendezvous_handler")
LAUNCHERS = ("torch/multiprocessing/spawn.py", "torch/distributed/elastic/", "torch/distributed/launcher/")
_WRAPPERS = ("wrapper", "wait", "_wait")


class Call(NamedTuple):
    """A call that waits for other ranks. `frame` is the user's line."""

    words: str
    frame: PyFrame | None


_MIN_POLLS_PER_SECOND = 0.2  # a long sleep has none
POLLS = "polls: it checks a condition again and again"


class Rank(NamedTuple):
    """Another rank: it waits too, is behind and on its way, has gone past this call, or stands for another reason."""

    name: str
    state: State
    how: str
    frame: PyFrame | None
    number: int | None = None


def call_of(process: ProcessView | None, view: InsideView) -> Call | None:
    """The call that the main thread of a process waits in; None if it does not wait for other ranks."""
    main = view.main
    if main is None or process is None or not stands(view):
        return None
    frame = _distributed(main)
    if frame is not None:
        if demand(native(process, main)) > BUSY and (view.job is None or view.job.backend != "nccl"):
            return None
        return Call(_words(main), caller_of(main, frame))
    job = view.job
    if job is None or job.world_size < 2:
        return None
    innermost = main.frames[0] if main.frames else None
    if innermost is not None and innermost.user and innermost.code.endswith(".wait()"):
        return Call("`wait`", innermost)  # of an asynchronous call: all other kinds of `wait` have frames of Python
    if sleeps(native(process, main)):
        return None
    if frames_in(main, "torch/nn/parallel/distributed.py") is not None:
        inside = frames_in(main, "torch/nn/parallel/distributed.py")
        assert inside is not None
        return Call("DistributedDataParallel", caller_of(main, inside)) if demand(process.main) < BUSY else None
    backward = frames_in(main, "torch/autograd/graph.py", "torch/autograd/__init__.py", "torch/_tensor.py")
    if backward is not None and (process.demand < BUSY or (job.backend == "nccl" and view.device_busy)):
        return Call("backward, where gradients are averaged over all ranks", caller_of(main, backward))
    if job.backend == "nccl" and view.device_busy:
        return Call("a wait for the GPU, which waits for other ranks", main.user_frame)
    return None


def _distributed(main: PyThread) -> PyFrame | None:
    """The outermost frame of torch.distributed that the thread is in, below the user's innermost line.

    Launchers are in there too, further out: they wait for processes and not for ranks.
    """
    found = None
    for frame in main.frames:
        if frame.user:
            break
        if "torch/distributed/" in frame.file and not any(
            part in frame.file for part in ("/elastic/", "/launcher/", "/run.py", "/checkpoint/")
        ):
            found = frame
    return found


def _words(main: PyThread) -> str:
    frame = _distributed(main)
    inner = next(
        (each for each in main.frames if "torch/distributed/" in each.file and each.function in _JOINING), None
    )
    if inner is not None:
        return JOINING
    names = [
        each.function
        for each in main.frames
        if "torch/distributed/" in each.file and each.function not in _WRAPPERS and not each.function.startswith("_")
    ]
    if names:
        return f"`{names[-1] if frame is None else names[0]}`"
    line = main.user_frame
    return f"`{line.code[:40]}`" if line is not None and line.code else "a call of torch.distributed"


def peer_states(stall: Stall, pid: int) -> list[Rank]:
    """The state of each other rank of the job, if it can be seen."""
    own = _updates(stall, pid)
    found: list[tuple[int, Rank]] = []
    children = [Peer(process=each, inside=stall.inside.get(each.pid)) for each in stall.processes if each.pid != pid]
    for peer in (*stall.peers, *children):
        rank = state_of(stall, peer, own)
        if rank is not None:
            view = peer.inside
            number = view.job.rank if view is not None and view.job is not None else None
            found.append((1 << 30 if number is None else number, rank._replace(number=number)))
    return [rank for _, rank in sorted(found, key=lambda entry: entry[0])]


def on_one_host(process: ProcessView | None) -> bool | None:
    """Whether all ranks of a job are on this host, by how it was started; None where that does not show."""
    known = process.environment if process is not None else {}
    if "WORLD_SIZE" in known and "LOCAL_WORLD_SIZE" in known:
        return known["WORLD_SIZE"] == known["LOCAL_WORLD_SIZE"]
    address = known.get("MASTER_ADDR")
    return None if address is None else address.startswith("127.") or address in ("localhost", "::1")


def _updates(stall: Stall, pid: int) -> int | None:
    if stall.box is not None and stall.box.pid == pid and stall.box.last is not None:
        return stall.box.last.updates
    return next((peer.updates for peer in stall.peers if peer.process.pid == pid), None)


def state_of(stall: Stall, peer: Peer, own: int | None = None) -> Rank | None:
    """What a process of the run does, if it is a rank; `own` is how many updates the rank that asks has made."""
    process, view, updates = peer.process, peer.inside, peer.updates
    if process.is_loader_worker or process.state in "ZX":
        return None
    if view is None:
        # It may be on its way: importing, say. Whoever does nothing is a launcher or a helper.
        works = process.demand > BUSY and any("python" in word for word in process.command[:1])
        if works:
            return Rank(f"process {process.pid}", "behind", "is at work", None)
        return Rank(f"process {process.pid}", "unknown", "did not answer in time", None) if peer.asked else None
    main = view.main
    if main is None or _launches(main):
        return None
    name = f"rank {view.job.rank}" if view.job is not None else f"process {process.pid}"
    frame = main.user_frame
    if own is not None and updates is not None and updates > own:
        return Rank(name, "ahead", f"has made {updates - own} more updates", frame)
    call = call_of(process, view)
    if call is not None:
        return Rank(name, "waits", f"waits in {call.words}", call.frame)
    row = native(process, main)
    works = main.moved or demand(row) > BUSY or sleeps(row) or process.demand > BUSY
    if not works:
        return Rank(name, "stands", "stands", frame)
    asleep = POLLS if main.moved or (row is not None and (row.wakes or 0.0) > _MIN_POLLS_PER_SECOND) else "sleeps"
    return Rank(name, "behind", asleep if sleeps(row) else "is at work", frame)


def _launches(main: PyThread) -> bool:
    """Whether a process only waits for those that it has started. Those have the launcher in their own stacks, too."""
    inner = list(itertools.takewhile(lambda frame: not frame.user, main.frames))
    if any(part in frame.file for frame in inner for part in LAUNCHERS):
        return True
    return main.waits_for is not None and main.waits_for.kind == "child process"
