"""Children of a script that die of an exception: told once, at the line of the child; the script is not blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import marked_line, run_script, torchmedic

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import multiprocessing, sys
import torch


def work(number=0):
    {work}  # <- cause


if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    if "pool" in sys.argv:
        with context.Pool(2) as pool:
            pool.map(work, range(4))
    children = [context.Process(target=work) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if "raise" in sys.argv:
        raise RuntimeError("a child has failed")
    if "exit" in sys.argv:
        sys.exit(1)
"""
PLAIN, SHAPES = "{}['x']", "torch.ones(3) + torch.ones(4)"


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_that_ends_well_is_told_of_its_lost_children(tmp_path: Path, method: str) -> None:
    source = SCRIPT.format(work=PLAIN, method=method)
    (tmp_path / "train.py").write_text(source)
    # A process that is spawned has nothing of the fork that the other tests run in.
    finished = run_script(tmp_path, source) if method == "fork" else torchmedic(tmp_path, "train.py")

    assert finished.returncode == 0
    found = finished.only
    assert found.cause_location is not None
    assert (found.severity, found.cause_location.line) == ("warning", marked_line(source))
    assert "Process-1" in found.message
    assert finished.stderr.count("warning[") == 1
    assert "error[" not in finished.stderr


@pytest.mark.parametrize(
    ("work", "how", "code"), [(SHAPES, "raise", "TM153"), (SHAPES, "", "TM153"), (PLAIN, "exit", "TM900")]
)
def test_what_several_children_do_is_told_once(tmp_path: Path, work: str, how: str, code: str) -> None:
    source = SCRIPT.format(work=work, method="fork")
    finished = run_script(tmp_path, source, *how.split())

    found = finished.only
    assert found.cause_location is not None
    assert (found.code, found.cause_location.line) == (code, marked_line(source))
    assert "the script" not in found.message
    assert finished.stderr.count("error[") == (code != "TM900")


def test_what_a_pool_raises_again_is_blamed_on_the_line_of_the_child(tmp_path: Path) -> None:
    source = SCRIPT.format(work=PLAIN, method="fork")
    finished = run_script(tmp_path, source, "pool")

    found = finished.only
    assert found.cause_location is not None
    assert found.cause_location.line == marked_line(source)
    assert found.message.startswith("a child process of the script stopped with KeyError")


def test_a_thread_that_fails_is_no_lost_child(tmp_path: Path) -> None:
    source = "import threading, torch\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
    finished = run_script(tmp_path, source)
    assert (finished.returncode, finished.report.diagnoses) == (0, ())
