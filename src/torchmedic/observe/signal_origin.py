"""Who sent the signal that ends a process: the processor, the process itself, or another process.

The kernel tells that to a signal handler (`siginfo_t`) and to nobody else, and faulthandler does not write it down. No
Python code can run in such a handler. So a few machine instructions stand before the handler that is there: they copy
the sender into the black box and jump on. Only for Linux on x86-64; elsewhere the sender stays unknown.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import struct
import sys

from torchmedic.observe.step.blackbox import BlackBox

_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_DEFAULT, _IGNORED = 0, 1
_SA_SIGINFO = 4


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class SignalOrigin:
    """Writes the sender of a fatal signal into the black box of this process."""

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
