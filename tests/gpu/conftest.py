"""The card is shared by the workers of a run of pytest."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _turn_on_the_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test marked `alone` while no other worker uses the card: beside others, times on it say little."""
    alone = request.node.get_closest_marker("alone") is not None
    with (Path(tempfile.gettempdir()) / "torchmedic-gpu-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
