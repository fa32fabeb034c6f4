"""`make new-rule` writes all files of a rule, or says in one line why it writes none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = (
    "from torchmedic.diagnose import catalogue, registry; import make_index; "
    "print(catalogue.find('TM288').name, registry.NUMBERS[-2:], '[TM288]' in make_index.index())"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("src/torchmedic", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "integration" / "rule_cases").mkdir(parents=True)
    return tmp_path


def begin(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "new_rule.py"), "--root", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True)


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_a_rule_is_begun_and_registered_before_the_most_general_one(copy: Path) -> None:
    before = files(copy)

    done = begin(copy, "TM288", "bad-thing")

    assert (done.returncode, done.stderr) == (0, "")
    changed = {str(path.relative_to(copy)) for path, text in files(copy).items() if before.get(path) != text}
    assert changed == set(done.stdout.split())
    assert changed == {
        "docs/diagnoses/README.md",
        "docs/diagnoses/TM288-bad-thing.md",
        "src/torchmedic/diagnose/registry.py",
        "src/torchmedic/diagnose/rules/numbers/bad_thing.py",
        "tests/integration/rule_cases/TM288.txt",
    }
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy / 'docs'}"}
    told = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "bad-thing ('numbers.bad_thing', 'numbers.nonfinite_operation') True\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("TM201", "bad-thing"), "TM201 is taken by"),
        (("TM555", "bad-thing"), "TM555 is taken by slow-data"),
        (("TM288", "division-by-zero"), "the name division-by-zero is taken by TM"),
        (("TM288", "Bad_Thing"), "'Bad_Thing' is no name"),
        (("TM29", "bad-thing"), "'TM29' is no code"),
        (("TM799", "bad-thing"), "TM799 belongs to no family"),
        (("TM999", "bad-thing"), "TM999 belongs to no family"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(copy: Path, words: tuple[str, ...], why: str) -> None:
    before = files(copy)

    done = begin(copy, *words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"new-rule: {why}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert files(copy) == before
