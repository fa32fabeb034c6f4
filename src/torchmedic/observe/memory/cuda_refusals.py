"""The moment at which a CUDA allocation is refused, seen from inside the allocator, before anything is unwound.

By the time an exception arrives, what the failing operation had already made is gone, and with it the node of the
backward pass that was running. Only numbers and names are kept: a reference to a node would keep its graph alive.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from typing import Any, NamedTuple, Protocol

import torch

from torchmedic.contained import contained, report_fault
from torchmedic.source.objects.graph import name_of


class Refusal(NamedTuple):
    """An allocation that was refused; sizes in bytes."""

    device: int
    asked: int
    total: int
    free: int
    allocated: int
    reserved: int
    inactive_split: int
    node: str  # of the backward pass; "" in a forward one
    sequence: int  # of that node, -1 where there is none
    thread: int
    time: float


class Listener(Protocol):
    """Is told of every refusal, on the thread that asked."""

    def refused(self, asked: int) -> None:
        """Memory of so many bytes was refused; an OutOfMemoryError that is raised here ends the call that asked."""


_last: Refusal | None = None
_attached = False
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def last_refusal() -> Refusal | None:
    """The allocation that was refused last, on any device."""
    return _last


@functools.cache
def install() -> None:
    """Torch itself calls back, once, when it starts CUDA."""
    with contextlib.suppress(Exception):
        torch.cuda._lazy_call(_attach)


def listen(listener: Listener) -> None:
    """Tell a listener of the refusals, as long as it lives."""
    install()
    _listeners.add(listener)


@contained("observe.out_of_memory")
def _attach() -> None:
    global _attached
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or _attached:
        return
    _attached = True  # an observer cannot be taken away again
    attach(_refused)


def _refused(device: int, asked: int, total: int, free: int) -> None:
    """Called on the failing thread. A program whose allocations fail often must not be slowed down."""
    if not sys.is_finalizing():
        _note(device, asked, total, free)
        for listener in list(_listeners):
            try:
                listener.refused(asked)
            except torch.OutOfMemoryError:
                raise
            except Exception as fault:
                report_fault("observe.out_of_memory", fault)


@contained("observe.out_of_memory")
def _note(device: int, asked: int, total: int, free: int) -> None:
    global _last
    node: Any = torch._C._current_autograd_node()
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    _last = Refusal(
        device=device,
        asked=asked,
        total=total,
        free=free,
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        inactive_split=stats.get("inactive_split_bytes.all.current", 0),
        node=name_of(node) if node is not None else "",
        sequence=int(node._sequence_nr()) if node is not None else -1,
        thread=threading.get_ident(),
        time=time.time(),
    )
