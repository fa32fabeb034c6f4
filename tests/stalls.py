"""Stand-ins for stalls that no test can bring about, or only on another machine."""

from __future__ import annotations

from typing import Any

from torchmedic.diagnose.registry import STALLED, load
from torchmedic.diagnose.rule import Draft
from torchmedic.records import BoxContents, Diagnosis, Moment
from torchmedic.records.inside import InsideView, PyFrame, PyThread
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Stall

PID = 100
SITE = "/usr/lib/python3/site-packages/"


def user(line: int = 7, code: str = "loss.item()", function: str = "train") -> PyFrame:
    return PyFrame(file="/home/me/train.py", line=line, function=function, user=True, code=code)


def library(path: str, function: str) -> PyFrame:
    return PyFrame(file=SITE + path, line=1, function=function)


def thread(*frames: PyFrame, moved: bool = False, **fields: Any) -> PyThread:
    """The main thread, seen at one instruction or at several."""
    samples = ("1:2", "1:4", "1:2") if moved else ("1:2", "1:2", "1:2")
    return PyThread(ident=1, tid=PID, main=True, frames=frames, samples=samples, **fields)


def process(pid: int = PID, *, demand: float = 0.0, name: str = "", **fields: Any) -> ProcessView:
    row = ThreadView(
        tid=pid,
        name=name,
        state="R" if demand else "S",
        busy=demand,
        demand=demand,
        **{key: fields.pop(key) for key in ("syscall", "wakes_in", "asleep", "native") if key in fields},
    )
    return ProcessView(
        pid=pid, name=name, state="S", threads=(row,), busy=demand, command=("python", "train.py"), **fields
    )


def inside(main: PyThread, pid: int = PID, **fields: Any) -> InsideView:
    return InsideView(pid=pid, time=0.0, threads=(main,), **fields)


def box(updates: int) -> BoxContents:
    moment = Moment(
        time=0.0, step=updates, micro_step=0, updates=updates, phase="other", file="", line=0, rss=0, device_memory=0
    )
    return BoxContents(pid=PID, started=0.0, clean_exit=False, moments=(moment,))


def stall(
    main: PyThread, own: ProcessView | None = None, *, view: dict[str, Any] | None = None, **fields: Any
) -> Stall:
    """A run that has made no progress for five seconds, of which two were the limit."""
    processes = (own or process(), *fields.pop("children", ()))
    inner = {PID: inside(main, **(view or {})), **fields.pop("others", {})}
    fields = {"still": 5.0, "limit": 2.0, **fields}
    return Stall(pid=PID, processes=processes, inside=inner, **fields)


def asked(rule: str, seen: Stall) -> Diagnosis | None:
    """What one rule says, which has to be among those that are asked."""
    (module,) = [each for each in STALLED if each.split(".")[-1] == rule]
    answer = load(module).check(seen)
    return answer.done() if isinstance(answer, Draft) else answer
