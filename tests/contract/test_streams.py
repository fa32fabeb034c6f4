"""What a script writes arrives byte for byte and in its order, whatever stdout and stderr are; a terminal stays one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from streams import Written, into_files, on_terminal, plain, through_pipes, watched

# Both streams in turn, as fast as it goes: whoever copies one of them alone gets the order wrong.
IN_TURN = """
import os
for number in range(3000):
    os.write(1, b"out %d\\n" % number)
    os.write(2, b"err %d\\n" % number)
"""
BINARY = """
import os
os.write(2, bytes(range(256)) * 40 + b"\\xff\\xfe no newline \\r\\n\\0")
os.write(1, bytes(range(255, -1, -1)) * 40)
os._exit(7)
"""
MANY = """
import sys
for number in range(100_000):
    print("a line of an ordinary length, number", number, file=sys.stderr)
"""
PROGRESS = """
import sys, time
for number in range(300):
    sys.stderr.write(f"\\r{number:4d}/300 \\u2588\\u2588")
    sys.stderr.flush()
    if number % 50 == 0:
        sys.stderr.write("\\r            \\r")
        sys.stderr.flush()
        print("epoch", number, flush=True)
print(sys.stdout.isatty(), sys.stderr.isatty(), file=sys.stderr)
"""
KILLED = "import os\nos.write(2, b'x' * 50_000 + b'last words')\nos.kill(os.getpid(), 9)"
ABORTED = "import os\nos.write(1, b'out')\nos.write(2, b'x' * 5_000 + b'last words')\nos.abort()"
SCRIPTS = {
    "in turn": IN_TURN,
    "binary": BINARY,
    "100,000 lines": MANY,
    "progress bar": PROGRESS,
    "killed": KILLED,
    "aborted": ABORTED,
}

Way = Callable[[Path, list[str]], Written]
WAYS: dict[str, Way] = {
    "two pipes": through_pipes,
    "one pipe": partial(through_pipes, both=True),
    "two files": into_files,
    "one file": partial(into_files, both=True),
    "one file to append to": partial(into_files, both=True, flags=os.O_APPEND),
    "one raw terminal": on_terminal,
    "one terminal": partial(on_terminal, raw=False),
    "a terminal and a pipe": partial(on_terminal, both=False),
}
OF_EVERY_SCRIPT = {"two pipes", "a terminal and a pipe"}
# Every way with the script that shows a wrong order, every script through a pipe and on a terminal; the rest is slow.
PAIRS = [
    pytest.param(script, way, marks=() if script == "in turn" or way in OF_EVERY_SCRIPT else pytest.mark.slow)
    for script in SCRIPTS
    for way in WAYS
]


@pytest.mark.parametrize(("script", "way"), PAIRS)
def test_the_same_bytes(tmp_path: Path, script: str, way: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS[script])
    expected = WAYS[way](tmp_path, plain("train.py"))
    assert len(expected.stderr or expected.stdout) > 1000  # it did write
    assert without_diagnosis(WAYS[way](tmp_path, watched("train.py"))) == expected


def without_diagnosis(written: Written) -> Written:
    """A kill is explained behind everything that the script has written."""
    diagnosis = re.compile(rb"\r?\n(\x1b\[[0-9;]*m)*error(\x1b\[[0-9;]*m)*\[TM805\].*", re.DOTALL)
    return replace(written, stdout=diagnosis.sub(b"", written.stdout), stderr=diagnosis.sub(b"", written.stderr))
