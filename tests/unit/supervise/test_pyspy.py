"""Python stacks from outside: what py-spy says of a real process, and what we make of it when it says nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import awaited, child, linux_only

from torchmedic.supervise.proc import pyspy

ANSWER = [
    {
        "pid": 5,
        "thread_id": 0x7F00,
        "os_thread_id": 5,
        "thread_name": "MainThread",
        "owns_gil": True,
        "frames": [
            {"name": "sre_match", "filename": "/usr/lib/libpython3.11.so.1.0", "module": "/usr/lib/lib.so", "line": 0},
            {"name": "match", "filename": "/opt/py/lib/python3.11/re/__init__.py", "module": None, "line": 166},
            {
                "name": "Trainer.fit.<locals>.step",
                "filename": "/home/me/train.py",
                "module": None,
                "line": 9,
                "locals": [{"name": "text", "repr": "a" * 500}, {"name": "n", "repr": "3"}],
            },
        ],
    }
]


def test_an_answer_is_read() -> None:
    dump = pyspy.parse(json.dumps(ANSWER).encode(), 5)
    (thread,) = dump.threads
    assert (thread.ident, thread.tid, thread.main, thread.holds_gil) == (0x7F00, 5, True, True)
    assert [(frame.function, frame.line, frame.user) for frame in thread.frames] == [
        ("match", 166, False),
        ("step", 9, True),
    ]
    assert dump.native == {5: ("sre_match (lib.so)",)}


@pytest.mark.parametrize("answer", [b"", b"{", b"[3]", b'[{"frames": 7}]', b'{"a": 1}', b"\xff\xfe"])
def test_nonsense_is_no_error(answer: bytes) -> None:
    assert pyspy.parse(answer, 5).threads == ()


def test_py_spy_that_is_absent_slow_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    monkeypatch.setattr(pyspy, "executable", lambda: str(program))
    program.write_text("#!/bin/sh\nsleep 100 & wait\n")
    program.chmod(0o755)
    slow = pyspy.dump(5, limit=0.1)
    assert slow is not None
    assert "did not answer" in slow.failure
    program.write_text("#!/bin/sh\necho 'Error: cannot\nReason: no Python in it' >&2\nexit 1\n")
    refused = pyspy.dump(5, limit=60)
    assert refused is not None
    assert refused.failure == "py-spy: no Python in it"
    program.write_text("#!/bin/sh\necho 'Permission Denied: Try again' >&2\nexit 1\n")
    refused = pyspy.dump(5, limit=60)
    assert refused is not None
    assert refused.failure == pyspy.NOT_PERMITTED
    monkeypatch.setattr(pyspy, "executable", lambda: None)
    assert pyspy.dump(5) is None


def _searching(pid: int) -> pyspy.Dump | None:
    dump = pyspy.dump(pid, native=True)
    assert dump is not None
    inside = dump.threads and any(frame.function == "search" for frame in dump.threads[0].frames)
    return dump if inside and dump.native.get(pid) else None


@linux_only
@pytest.mark.skipif(pyspy.executable() is None, reason="py-spy is not installed")
@pytest.mark.skipif(sys.version_info >= (3, 15), reason="py-spy must know this Python")
def test_a_process_that_holds_the_gil_in_c(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    source = "import re\ndef search():\n    return re.match('(a?){40}a{40}', 'a' * 40)\nsearch()\n"
    script.write_text(source)
    with child(f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))") as started:
        dump = awaited(lambda: _searching(started.pid))
    (thread,) = dump.threads
    assert thread.holds_gil
    own = thread.user_frame
    assert own is not None
    assert (own.file, own.line, own.function) == (str(script), 3, "search")
