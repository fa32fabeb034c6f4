"""How memory went before a process was killed: what the kernel said, the last samples, who held most."""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.diagnose.words.death import draft_of, line_location, who
from torchmedic.diagnose.words.format import size
from torchmedic.records import Diagnosis, Location, Moment
from torchmedic.records.death import Death
from torchmedic.records.memory import HeldMemory, MemorySample, comparable

Proof = tuple[str, str]  # in words, and the fact behind it

NEAR_LIMIT = "its memory was close to the limit when it was killed; the kernel's own word is missing"

_NEAR_SHARE = 0.9
_OOM_LINE = "killed process"
_MIN_GROWTH_FACTOR = 1.2
_MIN_GROWN_BYTES = 64 << 20  # bytes
_WINDOW_SECONDS = 10.0  # seconds


class LastMemory:
    """The memory of one process that is gone."""

    def __init__(self, death: Death) -> None:
        self.death = death
        self.kernel_lines = [line for line in death.kernel_lines if _OOM_LINE in line.lower()]
        self.used = max(death.peak_rss or 0, max((moment.rss for moment in self._moments), default=0))

    @property
    def near_group_limit(self) -> bool:
        return self._is_near(self.death.memory_limit, "cgroup")

    @property
    def near_host_limit(self) -> bool:
        return self._is_near(self.death.host_memory, "host")

    def _is_near(self, limit: int | None, bound: str) -> bool:
        shares = [each.share for each in self._samples[-3:] if each.bound == bound]
        return limit is not None and (self.used > _NEAR_SHARE * limit or max(shares, default=0.0) > _NEAR_SHARE)

    @property
    def reached_group_limit(self) -> bool:
        """Whether the group was at its limit: a kill for the memory of the whole host is counted in it too."""
        hits = self.death.limit_hits
        return hits > 0 if hits is not None else self.near_group_limit

    @property
    def hits(self) -> str:
        hits = self.death.limit_hits
        return f", and the limit was hit {hits} times" if hits else ""

    @property
    def counted(self) -> Proof | None:
        """The fact that the kernel has counted a kill, in words; None if it has not."""
        kills = self.death.oom_kills
        if not kills:
            return None
        fact = f"memory.events: oom_kill rose by {kills} in the last seconds"
        return "the kernel counted a kill for memory in the run's cgroup at that moment", fact

    def draft(self, rule: Rule[Any], why: str, proof: Proof, kernel_lines: list[str]) -> Draft:
        """Begin a diagnosis; a line of the kernel's log, or its count of kills, makes it proven."""
        words, fact = proof
        draft = draft_of(
            rule,
            self.death,
            "proven" if kernel_lines or self.death.oom_kills else "likely",
            f"{who(self.death)} was killed because {why}",
            f"SIGKILL, and {words}",
        )
        draft.because(fact)
        return draft

    def tell(self, draft: Draft) -> None:
        """Add the course of the memory as the parent saw it, also if many processes filled it together."""
        if self.death.swap_free == 0:
            draft.because("there is no free swap")
        samples = self._samples
        if len(samples) < 2:
            return
        first, last = samples[0], samples[-1]
        seconds = last.time - first.time
        rise = (last.used or 0) - (first.used or 0)
        if seconds >= 1 and rise > 0.02 * (last.limit or 1):
            draft.because(
                f"when it was last measured, {size(last.used or 0)} of {size(last.limit or 0)} were in use, "
                f"{size(rise)} more than {seconds:.0f} s before"
            )
        if last.waiting is not None and last.waiting >= 10:
            draft.because(f"all processes of the host waited for memory {last.waiting:.0f} % of the last ten seconds")
        if last.shm_used and last.shm_used > 0.1 * (last.limit or 1):
            draft.because(f"/dev/shm took {size(last.shm_used)} of it")
        others = sum(last.private.values()) - last.private.get(self.death.pid, 0)
        if len(last.private) > 1 and others > 0.2 * (last.limit or 1):
            many = len(last.private) - 1
            who = "another process of the run" if many == 1 else f"{many} other processes of the run"
            draft.because(f"{who} held {size(others)} for {'itself' if many == 1 else 'themselves'}")

    def holder(self, draft: Draft) -> Location | None:
        """The line that fills what held most of it, as the process itself knew shortly before."""
        held = self._held
        if held is None:
            return None
        items = f" in {held.items} items" if held.items else ""
        draft.because(f"shortly before, `{held.name}` held {size(held.nbytes)}{items}")
        return line_location("cause", held.file, held.line, f"`{held.name}` is filled here") if held.file else None

    @functools.cached_property
    def _held(self) -> HeldMemory | None:
        """The holder of a good part of all memory, or of its recent growth: a fork has much of its parent's memory."""
        found = next(iter(self.death.holders), None)
        return found if found is not None and found.nbytes >= min(self.used // 4, self._growth // 3) else None

    @property
    def _growth(self) -> int:
        sizes = [each.private[self.death.pid] for each in self._samples]
        return sizes[-1] - sizes[0] if sizes and sizes[-1] - sizes[0] > _MIN_GROWN_BYTES else self.used

    def blaming(self, holder: Location | None, diagnosis: Diagnosis) -> Diagnosis:
        """The line to change is the one that fills what held most; the one that came last is only where it ended."""
        if holder is None:
            return diagnosis
        others = tuple(
            replace(each, role="surfaced") if each.role == "cause" else each
            for each in diagnosis.locations
            if (each.file, each.line) != (holder.file, holder.line)
        )
        return replace(diagnosis, locations=(holder, *others))

    def advise(self, draft: Draft, more: str) -> None:
        """Memory that grew from step to step is kept by the script; memory that was there at once is simply needed."""
        moments = [moment for moment in self._moments if moment.rss]
        first, last = (moments[0], moments[-1]) if moments else (None, None)
        if (
            first is not None
            and last is not None
            and last.step - first.step >= 2
            and last.rss > _MIN_GROWTH_FACTOR * first.rss
        ):
            rate = (last.rss - first.rss) // (last.step - first.step)
            draft.because(f"resident memory grew by {size(rate)} a step, from step {first.step} to step {last.step}")
            if self._held is None:
                draft.help("look for tensors that are kept over steps: keep `loss.item()` or `x.detach()` instead")
                return
        if self._held is not None:
            draft.help(f"keep less in `{self._held.name}`: numbers, detached tensors, or only the last items")
        elif self.death.part == "worker":
            draft.help("use fewer DataLoader workers or a smaller `prefetch_factor`")
        else:
            draft.help(f"use a smaller batch, fewer workers, mapped instead of loaded data, or more memory: {more}")

    @functools.cached_property
    def _samples(self) -> list[MemorySample]:
        """Samples of the time in which the process still existed."""
        pid = self.death.pid
        return comparable([each for each in self.death.samples if each.private.get(pid)], _WINDOW_SECONDS)

    @property
    def _moments(self) -> tuple[Moment, ...]:
        return self.death.box.moments if self.death.box is not None else ()
