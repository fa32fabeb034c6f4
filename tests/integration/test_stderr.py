"""The child's stderr on its way through the parent: what is heard, and what must work as if nobody listened."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from running import clean_environment
from streams import Terminal, into_files, on_terminal, plain, through_pipes, watched

from torchmedic.detect.failures.kernel_asserts import assertions, words_of
from torchmedic.runfolder.gpu import read_kernel_words

SAID = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], "
    "thread: [{thread},0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
)
# In pieces, between other output, after a progress bar, and as often as threads say it.
SAYING = f"""
import os, sys, time
said = {SAID!r}
os.write(2, b"  3/10 |### | 12.3it/s\\xff]")
for piece in said.format(thread=4).partition("native/cuda"):
    os.write(2, piece.encode())
    time.sleep(0.01)
print("a line on stdout", flush=True)
for thread in range(5, 3000):
    os.write(2, said.format(thread=thread).encode())
os.write(2, b"Traceback: AssertionError: `no words of a kernel`\\n")
"""


@pytest.mark.parametrize("way", [through_pipes, into_files, on_terminal])
def test_the_kernels_words_are_heard(tmp_path: Path, way: object) -> None:
    (tmp_path / "train.py").write_text(SAYING)
    written = way(tmp_path, watched("train.py"))  # type: ignore[operator]
    assert written.status == 0, written.stderr
    (said,) = assertions(read_kernel_words(tmp_path / "run"))
    assert (said.line, said.kernel) == (245, "nll_loss_forward_reduce_cuda_kernel_2d")
    assert said.file == "/pytorch/aten/src/ATen/native/cuda/Loss.cu"
    assert (said.family, said.count) == ("label", 2996)


def test_of_a_command_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "words").write_text(SAID.format(thread=1) + SAID.format(thread=2))
    written = through_pipes(tmp_path, watched("--", "bash", "-c", "(cat words >&2); echo done; exit 3"))
    assert (written.status, written.stdout) == (3, b"done\n")
    assert [said.count for said in words_of(tmp_path / "run", 0)] == [2]


def test_the_dying_child_can_read_them(tmp_path: Path) -> None:
    """As the diagnosis does, which runs in the child."""
    reading = f"""
import os, pathlib
from torchmedic.detect.failures.kernel_asserts import words_of
os.write(2, {SAID!r}.format(thread=7).encode())
print([(said.family, said.count) for said in words_of(pathlib.Path("run"), 20)], flush=True)
"""
    (tmp_path / "train.py").write_text(reading)
    for way in (through_pipes, into_files):
        assert way(tmp_path, watched("train.py")).stdout == b"[('label', 1)]\n"
        subprocess.run(["rm", "-r", "run"], cwd=tmp_path, check=True)


def test_who_is_left_behind_can_still_write(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import subprocess\nsubprocess.Popen(['sh', '-c', 'cat go >&2'])\nprint('over', flush=True)\n"
    )
    os.mkfifo(tmp_path / "go")
    process = subprocess.Popen(
        watched("train.py"), cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.wait(60) == 0  # although somebody holds the pipe open
    (tmp_path / "go").write_bytes(b"late words")
    assert process.stderr is not None
    assert process.stderr.read() == b"late words"
    process.stderr.close()


def test_a_reader_that_goes_away_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nfor _ in range(10**7):\n    os.write(2, b'line\\n' * 100)\n")
    reader, writer = os.pipe()
    process = subprocess.Popen(watched("train.py"), cwd=tmp_path, env=clean_environment(), stderr=writer)
    os.close(writer)
    assert os.read(reader, 5) == b"line\n"
    os.close(reader)
    assert process.wait(60) == 1  # BrokenPipeError


@pytest.mark.parametrize(
    ("redirect", "seen"),
    [("2>&-", b"closed\n"), ("2>&- <&-", b"closed\n"), ("2>/dev/null", b"open\n"), (">/dev/null 2>&1", b"")],
)
def test_closed_and_null(tmp_path: Path, redirect: str, seen: bytes) -> None:
    said = SAID.format(thread=1).encode()
    (tmp_path / "train.py").write_text(
        f"import os\ntry:\n    os.write(2, {said!r})\n    print('open')\nexcept OSError:\n    print('closed')"
    )
    command = " ".join(watched("train.py"))
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirect}"], cwd=tmp_path, env=clean_environment(), capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, seen, b"")
    assert len(words_of(tmp_path / "run", 0)) == (0 if seen == b"closed\n" else 1)


def test_nothing_is_lost_to_a_reader_that_is_late(tmp_path: Path) -> None:
    """The child is dead before the first byte is read: some is in our pipe, some in our hands, some in the child's."""
    (tmp_path / "train.py").write_text(
        "import os\nos.write(2, b'word ' * 30_000 + b'the last one')\n"
        "os.write(1, b'%d\\n' % os.getpid())\nos.kill(os.getpid(), 9)\n"
    )
    process = subprocess.Popen(
        watched("train.py"), cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    _, written = process.communicate(timeout=60)
    before, _, _ = written.partition(b"\nerror[TM805]")
    assert before == b"word " * 30_000 + b"the last one"
    assert process.returncode == 137


ON_TERMINAL = """
import os, signal, sys, time
resized = []
signal.signal(signal.SIGWINCH, lambda *_: resized.append(1))
with open("/dev/tty", "w") as own:
    own.write("own terminal\\n")
print([os.isatty(fd) for fd in (0, 1, 2)], [os.get_terminal_size(fd).columns for fd in (0, 1, 2)], flush=True)
print(os.getpgrp() == os.tcgetpgrp(0), flush=True)
while not resized or os.get_terminal_size(2).columns == 100:
    time.sleep(0.02)
time.sleep(0.2)
print("resized", len(resized), [os.get_terminal_size(fd).columns for fd in (0, 1, 2)], flush=True)
"""


def test_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_TERMINAL)
    terminal = Terminal(tmp_path, watched("train.py"))
    terminal.read_until(lambda output: output.count(b"\n") == 3)
    assert sorted(terminal.output.splitlines()) == [b"True", b"[True, True, True] [100, 100, 100]", b"own terminal"]
    terminal.resize(40, 132)
    terminal.read_to_end()
    assert terminal.output.splitlines()[-1] == b"resized 1 [132, 132, 132]"
    assert terminal.status == 0


KEYS = """
import os, termios, tty
before = termios.tcgetattr(1)
tty.setcbreak(1)
print("a key?", flush=True)
print("got", os.read(0, 1), flush=True)
termios.tcsetattr(1, termios.TCSADRAIN, before)
print("a line?", flush=True)
print("got", os.read(0, 10), flush=True)
"""


@pytest.mark.parametrize("command", [plain, watched])
def test_set_up_through_stdout(tmp_path: Path, command: object) -> None:
    """As curses does: keys come without Enter and without an echo."""
    (tmp_path / "train.py").write_text(KEYS)
    terminal = Terminal(tmp_path, command("train.py"), raw=False)  # type: ignore[operator]
    terminal.read_until(lambda output: b"a key?\r\n" in output)
    terminal.type(b"x")
    terminal.read_until(lambda output: b"a line?\r\n" in output)
    terminal.type(b"yz\n")
    terminal.read_to_end()
    assert terminal.output.split(b"\r\n")[:5] == [b"a key?", b"got b'x'", b"a line?", b"yz", b"got b'yz\\n'"]


STOPPING = """
import sys, time
print("begun", file=sys.stderr, flush=True)
sys.stdin.readline()
print("went on", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("command", [plain, watched])
def test_stopped_and_taken_up_again(tmp_path: Path, command: object) -> None:
    """Ctrl-Z and `fg` in a shell, with and without."""
    (tmp_path / "train.py").write_text(STOPPING)
    run = " ".join(command("train.py"))  # type: ignore[operator]
    shell = ["/bin/bash", "--norc", "-c", f"set -m; {run}; echo status $?; fg >/dev/null; echo status $?"]
    terminal = Terminal(tmp_path, shell, raw=False)
    terminal.read_until(lambda output: b"begun" in output)
    time.sleep(0.2)
    terminal.type(b"\x1a")
    terminal.read_until(lambda output: b"status 148" in output)
    terminal.type(b"go on\n")
    terminal.read_to_end()
    assert terminal.output.split()[-4:] == [b"went", b"on", b"status", b"0"]


def test_our_words_come_after_the_childs(tmp_path: Path) -> None:
    """A death is explained when all that was said before it is on the screen."""
    (tmp_path / "train.py").write_text(
        "import os, torch\nos.write(2, b'word ' * 20_000 + b'the last one\\n')\nos.kill(os.getpid(), 9)\n"
    )
    written = through_pipes(tmp_path, watched("train.py"))
    before, found, _ = written.stderr.partition(b"\nerror[TM805]")
    assert found, written.stderr[-500:]
    assert before.rstrip() == b"word " * 20_000 + b"the last one"
