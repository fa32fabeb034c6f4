"""The frames of other threads, which the main thread gets back.

A function that returns while somebody holds its frame leaves its variables to that frame, and whoever drops the frame
last runs their destructors. The thread that answers the parent must not be the one. The destructor of a process group
lets the GIL go while it joins its threads; if the interpreter ends meanwhile, Python ends the waiting thread inside
of the destructor, and C++ aborts the process. So the main thread drops the frames, by a call of Python's C library
between two of its instructions.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from _thread import get_ident
from types import FrameType


class OtherThreads:
    """Lends the frames of all other threads to one thread."""

    def __init__(self) -> None:
        self._lent: set[FrameType] = set()
        self._given_back: list[set[FrameType]] = []  # alive until the main thread has emptied them

    def stacks(self) -> dict[int, list[FrameType]]:
        """The frames of each other thread, innermost first."""
        own = get_ident()
        found = {ident: _outwards(frame) for ident, frame in sys._current_frames().items() if ident != own}
        for frames in found.values():
            self._lent.update(frames)
        return found

    def main_frame(self) -> FrameType | None:
        """The innermost frame of the main thread."""
        return next(iter(self.stacks().get(threading.main_thread().ident or 0, ())), None)

    def give_back(self) -> None:
        """Let the main thread drop all frames that were lent; nobody else may hold one any longer."""
        lent, self._lent = self._lent, set()
        self._given_back = [each for each in self._given_back if each]  # the others have been emptied
        if not lent:
            return
        self._given_back.append(lent)
        python = ctypes.pythonapi
        python.Py_AddPendingCall(python.PySet_Clear, ctypes.c_void_p(id(lent)))  # refused: the frames stay alive


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


OTHERS = OtherThreads()  # lives as long as the process: the main thread may come late
