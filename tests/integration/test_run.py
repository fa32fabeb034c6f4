"""`torchmedic run` starts a script exactly as Python does, and ends as it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pairs import plainly, watched

WORLD = """
import os, signal, sys{torch}
sys.stdout.write("\\n".join(map(str, [
    sys.argv, sys.path, sys.flags, sys.orig_argv, sys.executable, sys.prefix, sys.warnoptions, sys._xoptions,
    __name__, __file__, __package__, __spec__ and __spec__.name, os.getcwd(), sys.stdin.read(),
    {{name: value for name, value in sorted(os.environ.items())}},
    [(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    signal.pthread_sigmask(signal.SIG_BLOCK, []), os.umask(0o22), sys.stdout.write_through, sys.stdin.isatty(),
    {no_torch} and [name for name in sys.modules if "torchmedic" in name],
    os.path.exists("/proc/self/fd/9"), [finder for finder in sys.meta_path if "Torch" not in str(finder)],
])))
raise SystemExit(7)
"""


def world(*, torch: bool = False) -> str:
    return WORLD.format(torch="\nimport torch" if torch else "", no_torch=not torch)


def same(folder: Path, *words: str, **options: object) -> None:
    plain = plainly(folder, *words, stdin="typed\n", **options)  # type: ignore[arg-type]
    other = watched(folder, *words, stdin="typed\n", **options)  # type: ignore[arg-type]
    assert plain.status == 7, plain.stderr
    assert strip(other.stdout) == strip(plain.stdout)
    assert (other.status, other.stderr) == (plain.status, plain.stderr)


def strip(text: str) -> str:
    """Without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_a_script_sees_the_same_world(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(world())

    same(tmp_path, "train.py", "--epochs", "3", "--", "-x")


def test_a_script_that_imports_torch_sees_the_same_world(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(world(torch=True))

    same(tmp_path, "train.py", "--epochs", "3", PYTHONPATH=str(tmp_path))


def test_a_module_a_directory_and_a_zip(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(world())
    (package / "__main__.py").write_text(world())
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("__main__.py", world())

    for words in (("-m", "package.train", "-m"), ("-m", "package"), ("package", "a"), ("job.zip", "b")):
        same(tmp_path, *words)
        for path in sorted((tmp_path / "run").iterdir(), reverse=True):
            path.unlink()


def test_a_script_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text(world())

    same(tmp_path, "jobs/train.py")


@pytest.mark.parametrize(
    "flags", [("-u",), ("-O", "-B"), ("-W", "error", "-Xdev"), ("-X", "utf8=1", "-OO"), ("-P",), ("-bq",)]
)
def test_flags_of_the_interpreter(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(world())

    same(tmp_path, "train.py", flags=flags)


def test_a_sitecustomize_of_the_users_own_runs_once(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nif 'torchmedic' not in sys.orig_argv: print('my site')"
    )
    (tmp_path / "train.py").write_text("import sitecustomize\nprint(sitecustomize.__file__)\n" + world())

    same(tmp_path, "train.py", PYTHONPATH=str(tmp_path / "site"))


def test_open_files_and_an_ignored_signal_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, signal\nprint(os.read(9, 4), signal.getsignal(signal.SIGUSR1))")
    (tmp_path / "data").write_text("data")
    done = subprocess.run(
        ["bash", "-c", f"trap '' USR1; exec 9<data; {sys.executable} -m torchmedic run train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("b'data' 1\n", "")


def test_a_script_without_torch_is_told_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1 / 0")

    plain, other = plainly(tmp_path, "train.py"), watched(tmp_path, "train.py")

    assert (other.status, other.stdout, other.stderr) == (plain.status, plain.stdout, plain.stderr)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"report.json"}


def test_any_command(tmp_path: Path) -> None:
    done = watched(tmp_path, "--", "bash", "-c", 'cat; echo "$0 $1"; exit 7', "a", "b c", stdin="in")
    assert (done.status, done.stdout, done.stderr) == (7, "ina b c\n", "")


def test_the_run_folder_is_private(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    watched(tmp_path, "train.py")
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o700
