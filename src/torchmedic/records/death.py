"""The end of a process as its parent knows it. Nothing here imports torch."""

from __future__ import annotations

from signal import Signals
from typing import Literal

import msgspec

from torchmedic.records import BoxContents, SignalOrigin, StackFrame, ThreadStack
from torchmedic.records.memory import HeldMemory, MemorySample


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that died without explaining itself, as seen from outside.

    `part` is the role of the process in the run. `surfaced` is the line of another process that noticed the death.
    In the last seconds before the end, `oom_kills` counts the kernel's out-of-memory kills in the run's cgroup,
    `host_oom_kills` those on the whole host, `limit_hits` how often the cgroup reached its limit, and `shm_low` is the
    least free space in /dev/shm. `samples` show the host's memory in that time. `holders` are the largest holders of
    memory at the last look into the process.
    """

    pid: int
    rank: int = 0
    part: Literal["script", "worker", "child"] = "script"
    signal: str | None = None
    exit_status: int | None = None
    ended: float = 0.0
    box: BoxContents | None = None
    threads: tuple[ThreadStack, ...] = ()
    surfaced: StackFrame | None = None
    sender: str = ""  # the name of the process that sent the signal, if it is known
    oom_kills: int | None = None
    host_oom_kills: int | None = None
    kernel_lines: tuple[str, ...] = ()
    memory_limit: int | None = None
    memory_high: int | None = None
    memory_peak: int | None = None
    limit_hits: int | None = None
    peak_rss: int | None = None
    host_memory: int | None = None
    swap_free: int | None = None
    shm_low: int | None = None
    shm_size: int | None = None
    samples: tuple[MemorySample, ...] = ()
    holders: tuple[HeldMemory, ...] = ()

    @property
    def origin(self) -> SignalOrigin | None:
        """Where the signal that killed the process came from; None if that is not known."""
        found = self.box.signal if self.box is not None else None
        return found if found is not None and Signals(found.number).name == self.signal else None

    @property
    def from_outside(self) -> bool:
        """Whether another process sent the signal."""
        return self.origin is not None and self.origin.code <= 0 and self.origin.pid != self.pid

    @property
    def step_number(self) -> int | None:
        """The step in which the process was last seen."""
        return self.box.last.step if self.box is not None and self.box.last is not None else None
