"""Who is blamed for a fatal signal: the sender, if another process sent it, or the code that died."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from running import marked_line, run_script

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the sender is known on x86-64 only"),
]

HEAD = """
import ctypes, faulthandler, os, subprocess, sys, time
import torch

model = torch.nn.Linear(3, 1)
for _ in range(3):
    model(torch.randn(2, 3)).sum().backward()
"""


@pytest.mark.parametrize(("number", "name"), [(6, "SIGABRT"), (11, "SIGSEGV"), (7, "SIGBUS"), (8, "SIGFPE")])
def test_a_signal_from_outside_names_its_sender(tmp_path: Path, number: int, name: str) -> None:
    kill = f'sender = subprocess.Popen(["bash", "-c", f"sleep 0.3; kill -{number} {{os.getpid()}}; sleep 5"])\n'
    say = "print(sender.pid, flush=True)\n"
    finished = run_script(tmp_path, HEAD + kill + say + "time.sleep(30)  # <- cause\n")

    assert finished.returncode == 128 + number
    found = finished.only
    assert (found.code, found.grade) == ("TM805", "proven")
    assert f"process {finished.stdout.strip()} (`" in found.message
    assert name in found.message
    assert "its own native code" not in finished.stderr


def test_faults_of_its_own_are_still_proven(tmp_path: Path) -> None:
    finished = run_script(tmp_path, HEAD + "ctypes.string_at(16)  # <- cause\n")
    found = finished.only
    assert (found.code, found.grade) == ("TM801", "proven")
    assert "the processor reported the fault at address 0x10" in found.evidence
    assert not any(fact.startswith("another thread") for fact in found.evidence), "torchmedic's own is none of theirs"


def test_a_fault_of_a_forked_child_is_not_told_of_its_parent(tmp_path: Path) -> None:
    fork = """
pid = os.fork()
if pid == 0:
    ctypes.string_at(16)
os.waitpid(pid, 0)
os.kill(os.getpid(), 9)
"""
    finished = run_script(tmp_path, HEAD + fork)
    assert finished.returncode == 137
    assert finished.only.code == "TM805"
    assert "SIGKILL" in finished.only.message


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_faulthandler_of_the_users_own_is_read(tmp_path: Path, when: str) -> None:
    """The stack is on stderr; the last training line is another one."""
    crash = "def crash():\n    ctypes.string_at(0)  # <- cause\n\n\ncrash()\n"
    enable = "faulthandler.enable()\n"
    source = f"import faulthandler\n{enable}{HEAD}{crash}" if when == "before" else HEAD + enable + crash
    finished = run_script(tmp_path, source)

    assert "Fatal Python error: Segmentation fault" in finished.stderr
    found = finished.only
    assert found.cause_location is not None
    assert (found.code, found.cause_location.line) == ("TM801", marked_line(source))
    assert found.grade == "proven"
