"""Mistakes that raise nothing: handed to the stages that judge them, in the middle of a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING

from torchmedic.contained import contained
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.unreached_parameters import Unreached
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.heap.walk import Held
from torchmedic.observe.loop.ledger import Habits

if TYPE_CHECKING:
    import torch

    from torchmedic.observe.agent import Agent


class Suspicions:
    """Called by the watches over the first steps, the loop and the heap; the hooks are paused meanwhile."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def _is_moot(self) -> bool:
        """Whether something worse went wrong, and has been reported."""
        return not self._agent.finite.on or self._agent.device_lost

    @contained("observe.silent")
    def check_up(self, graphs: Sequence[LossGraph], frame: FrameType | None) -> None:
        """The graphs of the first steps are known."""
        if not self._is_moot:
            with self._agent.paused():
                self._agent.stages.check_up(graphs, None, frame)

    @contained("observe.silent")
    def left_out(self, unreached: Unreached, frame: FrameType | None) -> None:
        """Some parameters had no gradient in several steps."""
        if not self._is_moot:
            with self._agent.paused():
                self._agent.stages.check_up((), unreached, frame)

    def run_eagerly(self, frame: FrameType, context: AbstractContextManager[None]) -> Sequence[torch.Tensor]:
        """Compiled code is to be looked at: run the step up to its backward again, without the compiler."""
        return self._run_eagerly(frame, context) or ()

    @contained("observe.silent")
    def _run_eagerly(self, frame: FrameType, context: AbstractContextManager[None]) -> Sequence[torch.Tensor]:
        if self._is_moot:
            return ()
        with self._agent.examining():
            return self._agent.stages.run_eagerly(frame, context)

    @contained("observe.silent")
    def look_at_loop(self, habits: Habits) -> None:
        """There is enough in the ledger to be judged."""
        if not self._is_moot:
            with self._agent.paused():
                self._agent.stages.examine_loop(habits)

    @contained("observe.leaks")
    def look_at_growth(self, watch: LeakWatch, frame: FrameType) -> None:
        """Something has grown at each of the last looks."""
        if not self._is_moot:
            with self._agent.paused():
                self._agent.stages.examine_growth(watch, frame)

    @contained("observe.leaks")
    def tell_holders(self, holders: list[tuple[Held, int]]) -> None:
        """Memory is short: write down who holds it."""
        self._agent.stages.report_holders(holders)
