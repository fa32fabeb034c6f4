"""No control character from an exception text, a file name or a report reaches the terminal."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from running import clean_environment

import torchmedic
from torchmedic.cli import main
from torchmedic.contained import fault_line
from torchmedic.observe.step.blackbox import FileBox
from torchmedic.records import Diagnosis, Fault, Location, Outcome, Report, Treatment
from torchmedic.records.plain_text import cleaned, visible
from torchmedic.runfolder import files
from torchmedic.settings import Format

pytestmark = pytest.mark.timeout(300)

# A colour, a new window title, a move of the cursor, C1, text from right to left, a separator of lines, DEL.
EVIL = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J \x9b2K \u202e\u2066 \u2028 \x7f \r \x08"
NEVER = [chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F)]
NEVER += [chr(code) for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))]
FOUND = Diagnosis(
    code="TM900" + EVIL,
    name=EVIL,
    grade="possible",
    message=EVIL,
    cause=EVIL,
    locations=(
        Location(role="cause", file=EVIL, line=2, column=1, end_column=4, code=EVIL, label=EVIL),
        Location(role="origin", file="b.py", line=2, code="x", label=EVIL * 20),
    ),
    evidence=(EVIL,),
    treatments=(Treatment(title=EVIL, result=EVIL, patch=f"@@ -1 +1 @@\n-{EVIL}\n+{EVIL}\n"),),
)


def bad(text: str) -> list[str]:
    return [repr(letter) for letter in text if letter in NEVER]


def test_every_control_character_is_shown() -> None:
    for letter in NEVER:
        assert bad(visible(f"a{letter}b")) == []
        assert visible(f"a{letter}b") != "ab"  # shown, not lost
    assert visible("a\tb\nü 漢 🙂 e\u0301") == "a\tb\nü 漢 🙂 e\u0301"
    assert cleaned("\x1b[1;31mboom\x1b[0m") == "boom"
    assert bad(cleaned("\x1b[3\x1b[0m1m")) == []  # what is left of it is no colour
    assert bad(fault_line(Fault(where="x", error=EVIL), EVIL)[:-1]) == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose report another program wrote, with a hostile name."""
    folder = tmp_path / f"run{EVIL}"
    (folder / f"rank0{EVIL}").mkdir(parents=True)
    FileBox(folder / f"rank0{EVIL}" / files.BLACK_BOX).write(1, 1, 0, 1, EVIL, 1, 0, 0)
    report = Report(outcome=Outcome(exit_status=1, signal=EVIL, symptom=EVIL), diagnoses=(FOUND,))
    (folder / "report.json").write_bytes(msgspec.json.encode(report))
    return folder


@pytest.mark.parametrize(
    "words",
    [("report", "--notes", "-f", form) for form in get_args(Format)] + [("watch",), ("repro",), ("report", "--html")],
    ids=" ".join,
)
def test_verbs_that_read_a_run_folder(run: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    main([*words, str(run)])
    said = capfd.readouterr()
    assert said.out + said.err
    assert bad(said.out.replace("\n", "")) == bad(said.err) == []
    if words[-1] == "--html":
        assert bad((run / "report.html").read_text()) == []
    if words[-1] == "json":
        assert msgspec.json.decode(said.out, type=Report).diagnoses == (FOUND,)  # escaped, not changed


@pytest.mark.parametrize(
    "words",
    [
        ["report", EVIL],
        ["repro", EVIL],
        ["watch", EVIL],
        ["explain", EVIL],
        ["preflight", f"{EVIL}.py"],
        ["attach", EVIL],
        ["run", f"{EVIL}.py"],
        ["run", "--format", EVIL, "x.py"],
        ["run", "--", EVIL],
        [EVIL],
        ["report", "--" + EVIL],
    ],
    ids=lambda words: words[0][:9].strip("\x1b["),
)
def test_errors_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capfd.readouterr()
    assert said.err
    assert bad(said.out) == bad(said.err) == []


RAISES = f"""
import os, sys, torch
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the traceback is the script's own
def step():
    raise RuntimeError({EVIL!r} + "\\ud800 mat1 and mat2 shapes")
step()
"""


def test_a_run_whose_exception_and_name_are_hostile(tmp_path: Path) -> None:
    name = f"train{EVIL}.py".replace("\r", "")
    (tmp_path / name).write_text(RAISES)
    done = started(tmp_path, "run", "--output", "run", name)
    assert done.returncode == 1
    assert done.stderr == ""  # an ordinary error of Python is explained in the report only
    report = (tmp_path / "run" / "report.json").read_text()
    assert bad(report) == []
    (found,) = files.read_report(tmp_path / "run").diagnoses
    assert bad(str(found)) == []
    assert "red \\x1b]0;title" in found.cause  # without the colour, but with all that was said
    for path in (tmp_path / "run").rglob("*.json*"):
        assert bad(path.read_text()) == [], path


def test_attach_and_preflight(tmp_path: Path) -> None:
    name = f"train{EVIL}.py".replace("\r", "")
    source = "import sys, threading\nprint('up', flush=True)\nthreading.Lock().acquire()\n"
    (tmp_path / name).write_text(source + "sys.stdin.read()\n")
    done = started(tmp_path, "preflight", name)
    assert bad(done.stdout) == bad(done.stderr) == []
    with subprocess.Popen(
        [sys.executable, name, EVIL], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        done = started(tmp_path, "attach", "--seconds", "0.5", str(process.pid))
        process.kill()
    assert done.stdout + done.stderr
    assert bad(done.stdout) == bad(done.stderr) == []


def started(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchmedic", *words],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=250,
        stdin=subprocess.DEVNULL,
        check=False,
    )


# Texts of torchmedic's own, JSON that has been escaped, or answers that another process of torchmedic decodes.
PLAIN = {
    "cli/demo.py",
    "cli/explain.py",
    "observe/failures/exceptions.py",  # two lines that Python itself would have written
    "observe/installation.py",
    "repro/worker.py",
    "supervise/child/signals.py",
    "supervise/preflight/cards.py",
    "supervise/preflight/disks.py",
}
SAFE = {"visible", "fault_line", "encode", "visible_json", "ascii"}


def test_nothing_is_printed_past_the_gate() -> None:
    """Whoever prints by hand makes the text visible in the same function."""
    home = Path(torchmedic.__file__).parent
    printing = []
    for path in sorted(home.rglob("*.py")):
        name = path.relative_to(home).as_posix()
        if name.startswith("demos/") or name in PLAIN:
            continue
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                writes = called & {"print", "sys.stderr.write", "sys.stdout.write", "sys.stderr.writelines"}
                if writes and not called & SAFE:
                    printing.append(f"{name}: {function.name}")
    assert printing == []


def test_the_console_keeps_its_own_colours(run: Path) -> None:
    code = "import sys; from torchmedic.cli import main; main(sys.argv[1:])"
    leader, follower = os.openpty()
    environment = {**clean_environment(), "TERM": "xterm", "COLUMNS": "200"}
    environment.pop("NO_COLOR")
    with subprocess.Popen([sys.executable, "-c", code, "report", str(run)], env=environment, stdout=follower):
        os.close(follower)
        said = b""
        while chunk := _read(leader):
            said += chunk
    os.close(leader)
    assert b"\x1b[1;31merror" in said  # ours
    assert b"\x1b]0;" not in said
    assert b"\x1b[2J" not in said
    assert b"\\x1b]0;title" in said


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end is closed
        return b""
