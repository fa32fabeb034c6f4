"""Scripts that have 8 MiB of shared memory: in a mount namespace of their own, where one can be made.

The script makes it on its first line, so that its lines keep their numbers; its workers are in it too.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from running import Finished, run_script

# To unshare mounts, to let none of them be seen outside, and to put a small file system in place of the large one.
_CONFINED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = [
    (libc.unshare, 0x20000),
    (libc.mount, None, b"/", None, 0x44000, None),
    (libc.mount, b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=8m"),
]
for function, *given in calls:
    if function(*given):
        raise OSError(ctypes.get_errno(), function.__name__)
"""


@functools.cache
def _is_possible() -> bool:
    return subprocess.run([sys.executable, "-c", _CONFINED], capture_output=True, check=False).returncode == 0


def run_in_small_shm(folder: Path, source: str) -> Finished:
    """As `run_script`, with 8 MiB of shared memory."""
    if not _is_possible():
        pytest.skip("no mount namespace can be made here")
    return run_script(folder, f"exec({_CONFINED!r}, {{}}); {source.lstrip()}")
