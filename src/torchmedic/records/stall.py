"""Records of a run that does not get on: what is known of it from outside and from inside.

Like `records/report.py`, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

import msgspec

from torchmedic.records import BoxContents, Phase
from torchmedic.records.gpu import GpuHealth
from torchmedic.records.host import HostPressure, PressureRates
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another process of the same run that may be a rank of the same job: from outside, and what it says of itself.

    `asked` is that it listens, so that it has an answer unless it came too late.
    """

    process: ProcessView
    asked: bool = False
    inside: InsideView | None = None
    updates: int | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the weights of a hung process could be saved, and where, or why not."""

    pid: int
    path: str = ""
    refused: str = ""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run that has not got on for longer than its phase ever took.

    `pid` is the process whose progress is missing; `processes` are it, its children and theirs. `still` says for how
    many seconds no step or phase has ended, `usual` what the longest such time was before, None in the first steps.
    `ended` are wait statuses of processes that are gone, `mute` are those that listen and did not answer. `attached` is
    that the run is not torchmedic's own. `peers` are the other processes of the run.
    `outsiders` are processes at the other ends of its pipes and sockets, `above` its parent and the parents of that.
    """

    pid: int
    rank: int = 0
    phase: Phase = "other"
    step: int = 0
    still: float
    limit: float
    usual: float | None = None
    attached: bool = False
    box: BoxContents | None = None
    processes: tuple[ProcessView, ...] = ()
    inside: dict[int, InsideView] = {}
    host: HostPressure | None = None
    pressure: PressureRates | None = None
    gpu: GpuHealth | None = None
    ended: dict[int, int] = {}
    mute: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    outsiders: tuple[ProcessView, ...] = ()
    above: tuple[int, ...] = ()
    peers: tuple[Peer, ...] = ()

    @property
    def step_number(self) -> int:
        return self.step

    def process(self, pid: int) -> ProcessView | None:
        return next((process for process in self.processes if process.pid == pid), None)

    @property
    def view(self) -> ProcessView | None:
        return self.process(self.pid)

    @property
    def inner(self) -> InsideView | None:
        return self.inside.get(self.pid)

    @property
    def thread(self) -> PyThread | None:
        """The main thread of the process that does not get on, as Python shows it."""
        return self.inner.main if self.inner is not None else None
