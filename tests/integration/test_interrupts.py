"""Signals reach the script exactly once, however they are sent, and nothing outlives its parent."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import awaited, is_gone
from running import clean_environment

# Tells what it gets, and whether it gets more than it WAITS for.
COUNTING = """
import os, signal, sys, time
got = []
def tell(number, _):
    got.append(number)
    os.write(1, b"got %s\\n" % signal.Signals(number).name.encode())
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), tell)
print(os.getpid(), "ready", flush=True)
while len(got) < WAITS:
    time.sleep(0.05)
time.sleep(0.7)
sys.exit(9)
"""
ONE, TWO = COUNTING.replace("WAITS", "1"), COUNTING.replace("WAITS", "2")

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"no\\n"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), "ready", flush=True)
while True:
    time.sleep(60)
"""

Started = tuple[subprocess.Popen[str], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    running: list[subprocess.Popen[str]] = []

    def begin(source: str) -> Started:
        (tmp_path / "train.py").write_text(source)
        process = subprocess.Popen(
            [sys.executable, "-m", "torchmedic", "run", "train.py"],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        pid, word = process.stdout.readline().split()
        assert word == "ready"
        return process, int(pid)

    yield begin
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_a_signal_to_the_parent_reaches_the_script_once(start: object, number: str) -> None:
    process, _ = start(ONE)  # type: ignore[operator]
    process.send_signal(getattr(signal, number))
    output, errors = process.communicate(timeout=60)
    assert (output, errors) == (f"got {number}\n", "")
    assert process.returncode == 9


def test_a_signal_to_the_whole_group_reaches_the_script_once(start: object) -> None:
    process, _ = start(ONE)  # type: ignore[operator]
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("got SIGINT\n", "")
    assert process.returncode == 9


def test_two_interrupts_are_two(start: object) -> None:
    process, _ = start(TWO)  # type: ignore[operator]
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "got SIGINT\n"
    assert process.communicate(timeout=60) == ("", "")


SAVING = """
import os, signal, sys, time
presses = []
signal.signal(signal.SIGINT, lambda *_: (presses.append(1), os.write(1, b"saving\\n")))
print(os.getpid(), "ready", flush=True)
while len(presses) < 2:
    time.sleep(0.05)
time.sleep(8)
print("saved", flush=True)
sys.exit(7)
"""


def test_a_script_that_handles_two_interrupts_is_left_to_save(start: object) -> None:
    process, _ = start(SAVING)  # type: ignore[operator]
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "saving\n"
    assert process.communicate(timeout=60) == ("saved\n", "")
    assert process.returncode == 7


def test_no_orphan_after_the_parent_was_killed(start: object) -> None:
    process, pid = start(STUBBORN)  # type: ignore[operator]
    process.kill()
    process.communicate(timeout=60)
    awaited(lambda: is_gone(pid))


def test_a_terminal_is_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.stdin.isatty(), input('name? '))\n" + ONE)
    output, status = in_terminal(tmp_path, {"name? ": b"medic\n", "ready\r\n": b"\x03"})
    assert "True medic" in output
    assert output.split("got", 1)[1].split() == ["SIGINT"]
    assert os.waitstatus_to_exitcode(status) == 9


def test_the_terminal_is_not_lost_when_input_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(open('/dev/tty').readline())\n" + ONE)
    output, status = in_terminal(tmp_path, {"": b"typed\n", "ready\r\n": b"\x03"}, redirect="< /dev/null")
    assert "typed" in output
    assert output.split("got", 1)[1].split() == ["SIGINT"]
    assert os.waitstatus_to_exitcode(status) == 9


def test_a_timer_set_before_us_is_for_the_script(tmp_path: Path) -> None:
    """An `alarm` outlives exec; it comes from the kernel, as what a terminal sends does, and reaches only us."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    output, status = in_terminal(tmp_path, {}, before="import signal; signal.alarm(5)")
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGALRM, output


def in_terminal(folder: Path, answers: dict[str, bytes], redirect: str = "", before: str = "") -> tuple[str, int]:
    """Run train.py in a terminal of its own, and type each answer once its prompt is seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        exec(before)
        command = f"exec {sys.executable} -m torchmedic run train.py {redirect}"
        os.execve("/bin/bash", ["bash", "-c", command], clean_environment())
    output, waiting, end = "", dict(answers), time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if select.select([terminal], [], [], 0.2)[0]:
                output += os.read(terminal, 4096).decode()
        except OSError:  # the other side is closed
            break
        for prompt in [prompt for prompt in waiting if prompt in output]:
            os.write(terminal, waiting.pop(prompt))
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return re.sub(r"\^C", "", output), status
