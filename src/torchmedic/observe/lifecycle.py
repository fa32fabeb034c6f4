"""The life of the agent in its process: installed once, then told of exceptions, forks and the exit."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch._C._dynamo.eval_frame import set_eval_frame

from torchmedic import contained as containment
from torchmedic.contained import contained
from torchmedic.observe.agent import Agent
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.device import cuda_start, hidden_work
from torchmedic.observe.failures import exceptions, worker_failures
from torchmedic.observe.hooks.loop_hooks import HabitHooks
from torchmedic.observe.memory import cuda_refusals, headroom
from torchmedic.observe.ranks import started_ranks
from torchmedic.observe.stages import Stages
from torchmedic.runfolder.layout import wants_checkup

_agent: Agent | None = None


def current() -> Agent | None:
    """The agent of this process, if it is watched."""
    return _agent


def install(run_dir: str, stages: Callable[[ProcessContext], Stages]) -> None:
    """Start to watch this process; `stages` makes what explains the incidents of it."""
    global _agent
    if _agent is not None:
        return
    _agent = agent = Agent(Path(run_dir), stages)
    containment.step_aside = set_eval_frame
    hidden_work.install()
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None, run_dir)
    if multiprocessing.parent_process() is None:
        contained("observe.open")(agent.open)()
    agent.clock.open_box = agent.open
    contained("observe.signals")(agent.signals.catch)()
    contained("observe.signals")(agent.signals.share_with_workers)()
    agent.hooks.install()
    if wants_checkup(agent.run):
        contained("observe.install")(HabitHooks(agent.habits, agent.step).install)()
        agent.habits.start()
        contained("observe.leaks")(agent.leaks.start)()
        contained("observe.checkup")(agent.checkup.start)()
    contained("observe.worker")(worker_failures.install)(agent.stages.explain_exhausted_worker, agent.child_ends)
    contained("observe.cuda_start")(cuda_start.install)()
    contained("observe.out_of_memory")(cuda_refusals.install)()
    contained("observe.out_of_memory")(headroom.reserve)()
    contained("observe.endings")(exceptions.install)(_on_exception, _on_child_end, _on_giving_up)
    contained("observe.ranks")(agent.collectives.install)()
    contained("observe.started_ranks")(started_ranks.install)()
    contained("observe.ear")(agent.listener.open)()
    contained("observe.threads")(agent.listener.threads.install)()
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_on_fork)
    atexit.register(_on_exit)


def _on_exception(error: BaseException) -> None:
    if _agent is not None:
        _agent.raised(error)


def _on_child_end() -> None:
    if _agent is not None:
        _agent.child_ends()


def _on_giving_up(frame: FrameType) -> None:
    if _agent is not None:
        _agent.gives_up(frame)


def _before_fork() -> None:
    if _agent is not None:
        contained("observe.ear")(_agent.listener.before_fork)()


def _after_fork() -> None:
    if _agent is not None:
        contained("observe.ear")(_agent.listener.after_fork_in_parent)()


def _on_fork() -> None:
    if _agent is not None:
        box, _agent.clock.box = _agent.clock.box, None  # before anything else can go wrong: it has one writer
        _agent.signals.origin.write_to(None)
        if box is not None:
            box.close()
        _agent.forked()
        if not _agent.hides_forks:
            contained("observe.ear")(_agent.listener.after_fork_in_child)()


def _on_exit() -> None:
    if _agent is not None:
        contained("observe.endings")(exceptions.look_back)(_on_exception)
        _agent.exiting()
