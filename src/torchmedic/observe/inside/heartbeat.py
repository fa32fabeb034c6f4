"""Whether the main thread runs Python code, or stands in one call.

Other threads see a loop with short rounds only where it gives the GIL away: at the same instruction every time, as if
the thread stood there. So Python is asked for a call between two instructions of the main thread. The call is one of
C's library: nothing of ours runs in the main thread, and no signal of the user's can end there.
"""

from __future__ import annotations

import ctypes

_SIZE_OF_SEMAPHORE = 64  # bytes, more than any system takes


class Heartbeat:
    """Counts the calls that the main thread has made for us; one is asked for at a time."""

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SIZE_OF_SEMAPHORE)
        self._asked = 0
        library = ctypes.CDLL(None)
        self._count = ctypes.c_int()
        try:
            self._post, self._value = library.sem_post, library.sem_getvalue
            self._works = library.sem_init(self._semaphore, 0, 0) == 0
        except AttributeError:
            self._works = False

    def beats(self) -> bool:
        """Whether the main thread has run Python code since the last question; asks the next one."""
        if not self._works:
            return False
        self._value(self._semaphore, ctypes.byref(self._count))
        answered = self._count.value == self._asked
        if answered and ctypes.pythonapi.Py_AddPendingCall(self._post, self._semaphore) == 0:
            self._asked += 1
        return answered and self._asked > 1


HEART = Heartbeat()  # lives as long as the process: a call may come late
