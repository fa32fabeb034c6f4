"""Who holds the memory of a process, told while it fills: the parent asks when little is left.

The watch over leaks looks between steps; what fills memory before the first step, in a worker or in a child process is
only seen so. It takes some ten milliseconds of a thread of ours, and happens at most a few times in a run.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from torch.utils.data import get_worker_info

from torchmedic.contained import report_fault
from torchmedic.observe import next_stages
from torchmedic.observe.heap.plain_objects import pile_of
from torchmedic.observe.heap.walk import Held, Walk
from torchmedic.runfolder import questions
from torchmedic.runfolder.layout import is_confidential

_TOLD = 5
_LEAST = 16 << 20  # bytes: less than that fills no memory


def tell(agent: Any) -> None:
    """Write down what holds most, with the lines that fill it."""
    if is_confidential(agent.run):
        return
    try:
        found = biggest(agent)
        told = next_stages.lines_of_holders().with_lines(found) if found else ()
        questions.write_held(agent.run, os.getpid(), told)  # nothing is an answer, too
    except Exception as error:
        report_fault("observe.holding", error)


def biggest(agent: Any) -> list[tuple[Held, int]]:
    """What the variables of the script and its data sets hold, the most first."""
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
    return [each for each in sorted(by_name.values(), key=lambda entry: -entry[1])[:_TOLD] if each[1] >= _LEAST]
