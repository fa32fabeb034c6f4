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
from torchmedic.records import Diagnosis, WorkerFailure
from torchmedic.runfolder.layout import wants_checkup

_agent: Agent | None = None
_is_prepared = False  # what is installed once per process is in place


def current() -> Agent | None:
    """The agent of this process, if it is watched."""
    return _agent


def install(run_dir: str, stages: Callable[[ProcessContext], Stages]) -> None:
    """Start to watch this process; `stages` makes what explains the incidents of it."""
    if _agent is not None:
        return
    agent = _begin(Agent(Path(run_dir), stages))
    if multiprocessing.parent_process() is None:
        contained("observe.open")(agent.open)()
    agent.clock.open_box = agent.open
    contained("observe.signals")(agent.signals.catch)()
    contained("observe.signals")(agent.signals.share_with_workers)()
    _watch(agent)
    _prepare()
    contained("observe.ranks")(agent.collectives.install)()
    contained("observe.ear")(agent.listener.open)()
    contained("observe.threads")(agent.listener.threads.install)()


def enter(
    run_dir: Path, stages: Callable[[ProcessContext], Stages], folder: Path | None, *, steps: int, brief: bool
) -> Agent:
    """Start to watch a part of what this process does. No parent process asks for anything; `leave` ends it.

    Args:
        run_dir: The run folder.
        stages: Makes what explains the incidents.
        folder: The folder of this process in the run, if it has one from an earlier part.
        steps: The number of steps in the earlier parts.
        brief: Whether the part is only a piece of a training loop: then the loop is not judged, and no black box kept.
    """
    agent = _begin(Agent(run_dir, stages, folder))
    agent.clock.count_from(steps)
    agent.clock.open_box = None if brief else agent.open  # when it is seen to train: most tests and cells do not
    _watch(agent, judged=not brief)
    _prepare()
    return agent


def resume(agent: Agent) -> None:
    """Watch one more brief part with an agent that has left the one before."""
    global _agent
    _agent = agent
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None, str(agent.run))
    is_told = not agent.finite.on  # a number that is not finite has been explained
    agent.hooks.install()
    if is_told:
        agent.finite.on = False


def leave() -> None:
    """Stop to watch, and leave torch as it was."""
    global _agent
    agent, _agent = _agent, None
    containment.on_fault(None)
    if agent is not None:
        agent.hooks.remove()
        agent.habits.stop()
        agent.checkup.stop()
        agent.leaks.stop()


def _begin(agent: Agent) -> Agent:
    global _agent
    _agent = agent
    containment.step_aside = set_eval_frame
    hidden_work.install()
    containment.on_fault(lambda fault: _agent.fault(fault) if _agent else None, str(agent.run))
    return agent


def _watch(agent: Agent, *, judged: bool = True) -> None:
    agent.hooks.install()
    if judged and wants_checkup(agent.run):
        contained("observe.install")(HabitHooks(agent.habits, agent.step).install)()
        agent.habits.start()
        contained("observe.leaks")(agent.leaks.start)()
        contained("observe.checkup")(agent.checkup.start)()


def _prepare() -> None:
    """Install what is installed once per process. It does nothing while there is no agent."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    contained("observe.worker")(worker_failures.install)(_on_exhausted_worker, _on_child_end)
    contained("observe.cuda_start")(cuda_start.install)()
    contained("observe.out_of_memory")(cuda_refusals.install)()
    contained("observe.out_of_memory")(headroom.reserve)()
    contained("observe.endings")(exceptions.install)(_on_exception, _on_child_end, _on_giving_up)
    contained("observe.started_ranks")(started_ranks.install)()
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_on_fork)
    atexit.register(_on_exit)


def _on_exhausted_worker(error: BaseException, failure: WorkerFailure) -> Diagnosis | None:
    return _agent.stages.explain_exhausted_worker(error, failure) if _agent is not None else None


def _on_exception(error: BaseException) -> None:
    if _agent is not None:
        _agent.raised(error)


def _on_child_end() -> None:
    if _agent is not None:
        _agent.child_ends()


def _on_giving_up(frame: FrameType, has_failed: bool) -> None:
    if _agent is not None:
        _agent.gives_up(frame, has_failed)


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
