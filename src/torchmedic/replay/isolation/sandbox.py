"""What surrounds every replay, so that nothing it does outlives it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import FrameType

from torchmedic.replay.isolation.deferred_signals import signals_deferred
from torchmedic.replay.isolation.outside_world import reading_refused, sealed
from torchmedic.replay.isolation.python_state import python_left_alone


@contextlib.contextmanager
def harmless(frame: FrameType) -> Iterator[None]:
    """Keep what is run here from the world outside, and put back what it changes in Python."""
    with contextlib.suppress(Exception):
        importlib.import_module("torch._dynamo")  # a replay loads it at some point, and it must not find our answers
    with signals_deferred(), python_left_alone(frame) as one_way, sealed(), reading_refused(one_way):
        yield
