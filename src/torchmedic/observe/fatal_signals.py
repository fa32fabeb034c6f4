"""The stacks of all threads of a process that a signal ends, in a file that the parent reads."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from torchmedic.contained import contained
from torchmedic.observe.failures import worker_failures
from torchmedic.observe.heap import worker_growth_watch
from torchmedic.observe.memory import headroom
from torchmedic.observe.signal_origin import SignalOrigin
from torchmedic.runfolder.files import STACKS
from torchmedic.runfolder.layout import new_file, new_folder

if TYPE_CHECKING:
    from torchmedic.observe.agent import Agent


class FatalSignals:
    """Keeps torchmedic's faulthandler beside the handlers of the user and of torch for the same signals."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._run = agent.run
        self._stacks: Any = None
        self._path = self._run / STACKS
        self._catches = False
        self.origin = SignalOrigin()
        self._kept_iterators: list[Any] = []  # of loaders whose workers have failed

    def catch(self) -> None:
        """Have the stacks of all threads written to the run folder when a signal ends this process."""
        folder = self._run / STACKS
        new_folder(folder, exist_ok=True)
        # The file is also how the parent learns of this process.
        self._stacks = os.fdopen(new_file(folder / f"{os.getpid()}.txt"), "wb", buffering=0)  # open to the end
        self._path = folder / f"{os.getpid()}.txt"
        # A faulthandler of the user's own writes where the user wants it; there is only one per process.
        if not faulthandler.is_enabled():
            faulthandler.enable(self._stacks, all_threads=True)
            self._catches = True
        if not self._agent.listener.forked:
            contained("observe.signal_origin")(self.origin.install)()

    def share_with_workers(self) -> None:
        """Have both handlers in a DataLoader worker, where torch sets its own for the same signals."""
        from torch.utils.data._utils import signal_handling

        name = "_set_worker_signal_handlers"
        original = getattr(signal_handling, name)

        @functools.wraps(original)
        def both(*args: Any, **kwargs: Any) -> Any:
            ours = self._catches
            if ours:
                faulthandler.disable()
            result = original(*args, **kwargs)
            if ours:
                faulthandler.enable(self._stacks, all_threads=True)
            if self._agent.listener.forked:
                contained("observe.worker")(worker_failures.end_with_parent)()
            contained("observe.worker")(headroom.reserve)(for_thread=True)
            worker_growth_watch.start(sys._getframe(1), self._run, self._agent.rank, self._agent.stages.in_worker)
            return result

        setattr(signal_handling, name, both)
        news = "_error_if_any_worker_fails"
        setattr(signal_handling, news, self._keeping_iterators(getattr(signal_handling, news)))

    def _keeping_iterators(self, original: Any) -> Any:
        """A handler that raises in the middle of anything ends the loop, and with it the iterator and its dataset."""

        @functools.wraps(original)
        def _error_if_any_worker_fails() -> None:
            try:
                original()
            except RuntimeError:
                self._kept_iterators = self._agent.batches.iterators()
                raise

        return _error_if_any_worker_fails

    def forked(self) -> None:
        """Open a file of its own in a forked child: the old one is the parent's."""
        if self._stacks is None:
            return  # no parent process reads the stacks of this run
        self.let_go()
        self.catch()

    def let_go(self) -> None:
        """Write no more stacks."""
        if self._catches:
            faulthandler.disable()
            self._catches = False

    def child_ended_well(self) -> None:
        """Remove the file, which is still empty."""
        if self._stacks is not None and os.fstat(self._stacks.fileno()).st_size == 0:
            self._path.unlink()
