"""The biggest holders of memory in a process, asked for by the parent when little memory is left.

The watch over leaks looks between steps. What fills memory before the first step, in a worker or in a child process is
seen only here. It takes about ten milliseconds of the listening thread, at most a few times in a run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from torch.utils.data import get_worker_info

from torchmedic.contained import report_fault
from torchmedic.observe.context import ProcessContext
from torchmedic.observe.heap.walk import Held, Walk
from torchmedic.records.memory import HeldMemory
from torchmedic.runfolder import questions
from torchmedic.runfolder.confidential import is_confidential
from torchmedic.source.objects.plain_objects import pile_of

_MAX_HOLDERS = 5
_MIN_BYTES = 16 << 20  # less than that fills no memory

Locate = Callable[[list[tuple[Held, int]]], list[HeldMemory]]


def tell(agent: ProcessContext, locate: Locate) -> None:
    """Write down what holds most; `locate` adds the lines that fill it."""
    if is_confidential(agent.run):
        return
    try:
        found = biggest(agent)
        told = locate(found) if found else []
        questions.write_held(agent.run, os.getpid(), told)  # an empty list is an answer, too
    except Exception as error:
        report_fault("observe.holding", error)


def biggest(agent: ProcessContext) -> list[tuple[Held, int]]:
    """The biggest holders among the variables of the script and its data sets, with their bytes."""
    worker = get_worker_info()
    data = [*agent.leaks.data_sets(), *([worker.dataset] if worker is not None else [])]
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    walk = Walk(0, {}, pile_of, weigh_all=True)
    found = walk.run(frame, data)
    held = [
        (found.holders[key], pile.nbytes + pile.data) for key, pile in found.weights.items() if pile and key[0] != 0
    ]
    held += [(each, each.size) for each in found.holders.values() if each.kind == "bytes"]
    by_name = {each.last: (each, nbytes) for each, nbytes in sorted(held, key=lambda entry: entry[1])}
    return [
        each for each in sorted(by_name.values(), key=lambda entry: -entry[1])[:_MAX_HOLDERS] if each[1] >= _MIN_BYTES
    ]
