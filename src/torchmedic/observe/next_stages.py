"""The stages behind this one, loaded when there is something to judge or to explain.

Named as text because imports point one way: observe knows nobody above it.
"""

from __future__ import annotations

import importlib
from typing import Any


def judge_of_loops() -> Any:
    """What tells a mistake from a habit."""
    return importlib.import_module("torchmedic.detect.loop.find")


def judge_of_growth() -> Any:
    """What tells a leak from a cache."""
    return importlib.import_module("torchmedic.detect.trends.heap_growth")


def exhausted_worker() -> Any:
    """What explains a DataLoader worker that has run out of memory."""
    return importlib.import_module("torchmedic.examine.exhausted_worker")


def lines_of_holders() -> Any:
    """What finds the lines that fill something; a small part of the next one."""
    return importlib.import_module("torchmedic.evidence.leaks.held_lines")


def ends_well() -> None:
    """The agent of a forked process that was ours alone: it leaves no word behind."""
    agent = importlib.import_module("torchmedic.observe.agent").current()
    if agent is not None:
        agent.child_ends()


def in_process() -> Any:
    """All of replay and diagnosis."""
    return importlib.import_module("torchmedic.examine.in_process")
