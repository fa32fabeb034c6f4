"""`torchmedic preflight` as a whole: good and bad input, questions without an answer, the table and the status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from torchmedic.cli import main
from torchmedic.supervise.host import host_pressure
from torchmedic.supervise.preflight import disks, examine, limits, memory
from torchmedic.supervise.preflight.questions import Question


def test_a_question_that_is_never_answered(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("import time\nprint('{}', flush=True)\ntime.sleep(1000)\n")
    (tmp_path / "dead.py").write_text("raise SystemExit('no luck')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    question = Question("silent", environ=environ)
    assert question.line(60) == {}
    with pytest.raises(TimeoutError):
        question.line(0.1)
    question.close()
    question.close()
    assert question._process.wait(60) == -signal.SIGKILL
    question = Question("dead", environ=environ)
    with pytest.raises(EOFError, match="no luck"):
        question.line(60)
    question.close()


def test_neither_preflight_nor_watch_imports_torch() -> None:
    code = "import sys, torchmedic.supervise.preflight.examine, torchmedic.supervise.preflight.finding\n"
    code += "import torchmedic.supervise.watching, torchmedic.report.live\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.py", None, "cannot find the script missing.py"),
        ("folder", "", "cannot read folder: it is not a script"),
        ("bad.py", b"x = 1\ndef (:\n", "cannot read bad.py:2: "),
        ("binary.py", b"\x7fELF\x00\x01\xff\xfe", "cannot read binary.py"),
        ("latin.py", b"x = '\xe9'\n", "cannot read latin.py"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    content: bytes | str | None,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content == "":
        (tmp_path / name).mkdir()
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    assert main(["preflight", name]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert says in captured.err


HEALTHY = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def main():
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    model = torch.nn.Linear(8, 3)
    for x, y in DataLoader(data, batch_size=8, num_workers=1):
        torch.nn.functional.cross_entropy(model(x), y).backward()

if __name__ == "__main__":
    main()
"""


def test_a_healthy_machine_and_script_then_a_team_that_never_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # This machine may be short of something that has nothing to do with the script.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kept = tuple(check for check in examine.CHECKS if check not in (disks.check, limits.check, memory.check))
    monkeypatch.setattr(examine, "CHECKS", kept)
    unthrottled = msgspec.structs.replace(host_pressure.read(), throttled_periods=None)
    monkeypatch.setattr(host_pressure, "read", lambda: unthrottled)
    (tmp_path / "train.py").write_text(HEALTHY)
    assert main(["preflight", "train.py"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "all ok" in captured.out
    assert "DataLoader workers  at most 1, train.py:8" in captured.out
    assert all(len(line) <= 80 for line in captured.out.splitlines())

    monkeypatch.setattr(examine, "_MAX_TRIAL_SECONDS", 2.0)
    script = "import os\nos.environ['OMP_THREAD_LIMIT'] = '1'\nimport torch\ntorch.set_num_threads(2)\n"
    (tmp_path / "train.py").write_text(script)
    assert main(["preflight", "--format", "json", "train.py"]) == 1
    told = json.loads(capfd.readouterr().out)
    assert (told["failures"], told["schema"]) == (1, 1)
    (failed,) = [each for each in told["checks"] if each["status"] == "fail"]
    assert failed["check"] == "OpenMP threads"
    assert "did not end" in failed["reason"]
