"""What may be a mistake although nothing has failed: put before the rules, in the middle of a run that goes on."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from torchmedic.contained import contained
from torchmedic.observe import next_stages
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.loop.ledger import Habits

if TYPE_CHECKING:
    from torchmedic.observe.agent import Agent


class Suspicions:
    """Of the first steps, of the loop, and of what grows."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._suspected: set[Any] = set()  # of the loop, which the rules have been asked about

    @property
    def _is_moot(self) -> bool:
        """Whether something else went wrong, and has been said."""
        return not self._agent.finite.on or self._agent.device_lost

    @contained("observe.silent")
    def check_up(self, graphs: Any, frame: FrameType) -> None:
        """The graphs of the first steps are known."""
        self._ask_about_step(graphs, None, frame)

    @contained("observe.silent")
    def left_out(self, unreached: Any, frame: FrameType | None) -> None:
        """Some parameters had no gradient in several steps."""
        self._ask_about_step((), unreached, frame)

    def _ask_about_step(self, graphs: Any, unreached: Any, frame: FrameType | None) -> None:
        if self._is_moot:
            return
        with self._agent.paused():
            next_stages.in_process().check_up(graphs, unreached, frame, self._agent)

    @contained("observe.silent")
    def look_at_loop(self, habits: Habits) -> None:
        """There is enough in the ledger to be judged."""
        if self._is_moot:
            return
        incidents = [
            incident
            for incident in next_stages.judge_of_loops().incidents(habits)
            if (incident.kind, incident.cause) not in self._suspected
        ]
        if not incidents:
            return
        self._suspected.update((incident.kind, incident.cause) for incident in incidents)
        with self._agent.paused():
            next_stages.in_process().silent(incidents, self._agent)

    @contained("observe.leaks")
    def look_at_growth(self, watch: LeakWatch, frame: FrameType) -> None:
        """Something has grown at every one of the last looks."""
        if self._is_moot:
            return
        found = [growth for growth in next_stages.judge_of_growth().growths(watch) if watch.wants_to_know(growth)]
        if not found:
            return
        with self._agent.paused():
            next_stages.in_process().growing(found, watch.looks, frame, self._agent)

    @contained("observe.leaks")
    def tell_holders(self, holders: Any) -> None:
        """Memory is short: leave word of who holds it."""
        next_stages.in_process().holding(holders, self._agent)
