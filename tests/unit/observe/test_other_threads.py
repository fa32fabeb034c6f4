"""Whoever looks at the frames of another thread does not become the owner of its variables."""

from __future__ import annotations

import threading
from typing import ClassVar

from torchmedic.observe.inside.other_threads import OtherThreads


class Ending:
    """Notes the thread that runs its destructor."""

    threads: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.threads.append(threading.get_ident())


def test_the_variables_of_a_frame_end_in_the_main_thread() -> None:
    others, entered, left = OtherThreads(), threading.Event(), threading.Event()

    def look() -> None:
        entered.wait()
        stacks = others.stacks()
        assert threading.get_ident() not in stacks
        left.wait()  # meanwhile the function returns, and its frame belongs to this thread
        del stacks
        others.give_back()

    def work() -> None:
        variable = Ending()
        entered.set()
        while not others._lent:
            pass
        assert variable.threads == []

    thread = threading.Thread(target=look)
    thread.start()
    work()
    assert Ending.threads == []
    left.set()
    thread.join()
    for _ in range(1000):  # room for the call between two instructions
        pass
    assert Ending.threads == [threading.main_thread().ident]
