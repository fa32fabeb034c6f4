"""What holds for every test: how helpers are found, what a process is started with, and who comes first."""

import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Where Python may not keep bytecode, each of the hundreds of processes that the tests start compiles all of torchmedic.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every script that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLEEPERS = ("test_hangs.py", "test_stalls.py", "test_interrupts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What mostly sleeps begins first, so that it does not end last, with the cores idle."""
    items.sort(key=lambda item: item.path.name not in _SLEEPERS)
