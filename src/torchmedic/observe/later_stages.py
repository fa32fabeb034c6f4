"""The stages behind this one, loaded when there is something to judge or to explain.

Named as text because imports point one way: observe knows nobody above it.
"""

from __future__ import annotations

import importlib
from typing import Any


def judge_of_loops() -> Any:
    """What tells a mistake from a habit."""
    return importlib.import_module("torchmedic.detect.silent")


def judge_of_growth() -> Any:
    """What tells a leak from a cache."""
    return importlib.import_module("torchmedic.detect.growth")


def in_process() -> Any:
    """All of replay and diagnosis."""
    return importlib.import_module("torchmedic.diagnose.in_process")
