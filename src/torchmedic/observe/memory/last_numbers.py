"""A few numbers that a process without memory writes down, for the parent to explain.

A limit whose hard value is as low as its soft one cannot be lifted to examine the process. Everything here is loaded
from the start and needs next to no memory; a little was set aside for it.
"""

from __future__ import annotations

from types import TracebackType

import msgspec

from torchmedic.contained import text_of
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.memory import headroom
from torchmedic.observe.memory.host import HostMemory
from torchmedic.observe.memory.limits import Setter
from torchmedic.records import StackFrame
from torchmedic.records.memory import HeldMemory
from torchmedic.source.user_code import is_user_file

KIND = "no-room"
_MAX_TEXT = 500  # characters


class NoRoom(msgspec.Struct, frozen=True, kw_only=True):
    """An exception for want of memory, in a process that could not look closer. `holders` and `setter` the parent adds.

    `text` is what the exception says, cut off. `lifted`: the soft limit was out of the way, and yet there was no room.
    """

    text: str = ""
    lifted: bool = False
    step: int | None = None
    rank: int = 0
    at: StackFrame | None = None
    memory: HostMemory = HostMemory()
    asked: int | None = None
    holders: tuple[HeldMemory, ...] = ()
    setter: Setter | None = None

    @property
    def step_number(self) -> int | None:
        return self.step


def leave_word(error: BaseException, agent: ProcessContext) -> None:
    """Write down what the user's exception says, and how much memory there is."""
    headroom.release()
    events = agent.open().events
    sizes = headroom.sizes()
    events.write("exception", symptom="out-of-memory", step=agent.clock.step, phase=agent.clock.phase_name)
    events.write(
        KIND,
        text=text_of(error)[:_MAX_TEXT],
        lifted=headroom.is_lifted("RLIMIT_AS") or headroom.is_lifted("RLIMIT_DATA"),
        step=agent.clock.step,
        rank=agent.rank,
        at=_user_line(error.__traceback__),
        memory=HostMemory(
            resident=sizes.get("VmRSS"),
            address_space=sizes.get("VmSize"),
            address_peak=sizes.get("VmPeak"),
            data=sizes.get("VmData"),
            address_limit=headroom.address_limit(),
            data_limit=headroom.data_limit(),
        ),
    )


def _user_line(tb: TracebackType | None) -> StackFrame | None:
    found = None
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            found = tb
        tb = tb.tb_next
    if found is None:
        return None
    code = found.tb_frame.f_code
    return StackFrame(file=code.co_filename, line=found.tb_lineno, function=code.co_name)
