"""A run that makes no progress, seen from outside and from inside. Nothing here imports torch."""

from __future__ import annotations

import msgspec

from torchmedic.records import BoxContents, Phase
from torchmedic.records.gpu import GpuHealth
from torchmedic.records.host import HostPressure, PressureRates
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.report import Location


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another process of the same run, which may be a rank of the same job.

    `asked`: the process listens and was asked; `inside` is its answer, if that came in time.
    """

    process: ProcessView
    asked: bool = False
    inside: InsideView | None = None
    updates: int | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The path of the saved weights of a hung process, or the reason why they were not saved."""

    pid: int
    path: str = ""
    refused: str = ""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run that has made no progress for longer than its phase ever took.

    `pid` is that process; `processes` are it and its descendants. `still` is the number of seconds in which no step or
    phase has ended, `usual` the longest such time before, None in the first steps. `mute` are processes that
    listen and did not answer. `attached`: torchmedic did not start the run. `peers` are the other processes of the run.
    `outsiders` are processes at the other ends of its pipes and sockets, `above` its ancestors. `raised` is where
    processes that have ended raised their exceptions.
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
    mute: tuple[int, ...] = ()
    outsiders: tuple[ProcessView, ...] = ()
    above: tuple[int, ...] = ()
    raised: dict[int, Location] = {}
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
        """The main thread of the process that makes no progress, as Python shows it."""
        return self.inner.main if self.inner is not None else None
