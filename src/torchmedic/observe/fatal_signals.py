"""The stacks of all threads of a process that a signal ends, in a file that the parent reads."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import mmap
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchmedic.contained import contained
from torchmedic.observe.failures import worker_failures
from torchmedic.observe.heap import worker_growth_watch
from torchmedic.observe.memory import headroom
from torchmedic.observe.step.blackbox import BlackBox
from torchmedic.runfolder.descriptors import open_to_the_end
from torchmedic.runfolder.files import STACKS
from torchmedic.runfolder.layout import new_folder

if TYPE_CHECKING:
    from torchmedic.observe.agent import Agent


_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_DEFAULT, _IGNORED = 0, 1
_ENABLE, _DISABLE, _IS_ENABLED = faulthandler.enable, faulthandler.disable, faulthandler.is_enabled
_SA_SIGINFO = 4


def _for_the_user(original: Callable[..., Any], signals: FatalSignals) -> Callable[..., Any]:
    """Stands for a function of `faulthandler`, and is pickled as it. A script asks whether a dump of its own is on.

    A function, as a replay does not go through what our functions hold.
    """

    @functools.wraps(original)
    def answered(*args: Any, **kwargs: Any) -> Any:
        return signals.answer(original, args, kwargs)

    return answered


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
        self._stacks = open_to_the_end(folder / f"{os.getpid()}.txt")
        self._path = folder / f"{os.getpid()}.txt"
        # A faulthandler of the user's own writes where the user wants it; there is only one per process.
        if not _IS_ENABLED():
            self._take()
            if faulthandler.enable is _ENABLE:  # else in a parent that has forked
                for original in (_ENABLE, _DISABLE, _IS_ENABLED):
                    setattr(faulthandler, original.__name__, _for_the_user(original, self))
        if not self._agent.listener.forked:
            contained("observe.signal_origin")(self.origin.install)()

    def _take(self) -> None:
        _ENABLE(self._stacks, all_threads=True)
        self._catches = True

    def answer(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function of `faulthandler` does and says where torchmedic's own dump does not exist."""
        if original is _ENABLE:
            _ENABLE(*args, **kwargs)
            self._catches = False
            return None
        if self._catches:
            return False
        result = original(*args, **kwargs)
        if original is _DISABLE:
            contained("observe.signals")(self._take)()
        return result

    def share_with_workers(self) -> None:
        """Have both handlers in a DataLoader worker, where torch sets its own for the same signals."""
        from torch.utils.data._utils import signal_handling

        name = "_set_worker_signal_handlers"
        original = getattr(signal_handling, name)

        @functools.wraps(original)
        def both(*args: Any, **kwargs: Any) -> Any:
            ours = self._catches
            if ours:
                _DISABLE()
            result = original(*args, **kwargs)
            if ours:
                self._take()
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
            _DISABLE()
            self._catches = False

    def child_ended_well(self) -> None:
        """Remove the file, which is still empty."""
        if self._stacks is not None and os.fstat(self._stacks.fileno()).st_size == 0:
            self._path.unlink()


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class SignalOrigin:
    """Writes the sender of a fatal signal into the black box: the processor, this process, or another process.

    The kernel tells the sender to a signal handler (`siginfo_t`) and to nobody else, and faulthandler does not write it
    down. No Python code can run in such a handler. So a few machine instructions run before the present handler: they
    copy the sender into the black box and jump to the handler. On other systems than Linux on x86-64 the sender stays
    unknown.
    """

    def __init__(self) -> None:
        self._nowhere = (ctypes.c_char * 16)()
        self._record: ctypes.Array[ctypes.c_char] = self._nowhere
        self._target = ctypes.c_uint64(ctypes.addressof(self._nowhere))  # where the instructions write to
        self._code: mmap.mmap | None = None

    def write_to(self, box: BlackBox | None) -> None:
        """Write to this black box from now on; to no box in a forked child, whose box was the parent's."""
        record = None if box is None else box.signal_record()
        record = self._nowhere if record is None else record
        self._target.value = ctypes.addressof(record)  # before the old record may go
        self._record = record

    def install(self) -> None:
        """Stand before the handlers of fatal signals. A signal without a handler is left alone."""
        if sys.platform != "linux" or platform.machine() != "x86_64" or self._code is not None:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        code = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(code))
        planned: list[tuple[int, _Action, int]] = []
        at = 0
        for each in _SIGNALS:
            action, number = _Action(), int(each)
            if libc.sigaction(number, None, ctypes.byref(action)):
                continue
            if action.handler not in (None, _DEFAULT, _IGNORED):
                part = _instructions(ctypes.addressof(self._target), action.handler)
                code[at : at + len(part)] = part
                planned.append((number, action, start + at))
                at += len(part)
        if libc.mprotect(ctypes.c_void_p(start), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
            return  # a kernel that lets no program write its own instructions
        self._code = code  # it must stay for as long as the process lives
        for number, action, handler in planned:
            action.handler = handler
            action.flags |= _SA_SIGINFO
            libc.sigaction(number, ctypes.byref(action), None)


def _instructions(target: int, handler: int) -> bytes:
    """`handler(edi = signal, rsi = siginfo, rdx = context)`: copy the sender, and jump to the handler before."""
    return b"".join(
        (
            b"\x48\xb8" + struct.pack("<Q", target),  # mov rax, target
            b"\x48\x8b\x00",  # mov rax, [rax]            the record
            b"\x8b\x4e\x08",  # mov ecx, [rsi + 8]        si_code
            b"\x89\x48\x04",  # mov [rax + 4], ecx
            b"\x48\x8b\x4e\x10",  # mov rcx, [rsi + 16]   si_pid and si_uid, or si_addr
            b"\x48\x89\x48\x08",  # mov [rax + 8], rcx
            b"\x89\x38",  # mov [rax], edi                the signal
            b"\x48\xb8" + struct.pack("<Q", handler),  # mov rax, handler
            b"\xff\xe0",  # jmp rax
        )
    )
