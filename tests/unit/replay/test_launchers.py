"""A step below a launcher is replayed; what a launcher does itself is not, as it would start processes again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from torchmedic.replay.step.step_frames import refuse_launchers
from torchmedic.source.segment.cut import CannotCut

LAUNCHER = "/venv/lib/python3/site-packages/torch/multiprocessing/spawn.py"


def called_by(file: str, function: Callable[[], object]) -> object:
    """Call a function from a frame of another file."""
    namespace: dict[str, object] = {"function": function}
    exec(compile("result = function()", file, "exec"), namespace)
    return namespace["result"]


def stack() -> list[tuple[FrameType, int, int | None]]:
    """The stack of the caller, the innermost frame first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append((frame, frame.f_lineno, None))
        frame = frame.f_back
    return found


def test_a_function_that_a_launcher_calls_is_the_users() -> None:
    found = called_by(LAUNCHER, lambda: stack()[:])
    refuse_launchers(found)  # type: ignore[arg-type]


def test_what_happens_in_a_launcher_is_refused() -> None:
    found = called_by(LAUNCHER, lambda: stack()[1:])  # without the function that the launcher called
    with pytest.raises(CannotCut, match="processes were started"):
        refuse_launchers(found)  # type: ignore[arg-type]
