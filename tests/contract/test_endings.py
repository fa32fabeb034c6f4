"""However a script ends, it ends with the same status, the same output and the same words as without torchmedic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pairs import Ended, plainly, watched
from running import run_script

HEAD = "import atexit, os, signal, sys, threading, {module}\nprint('begun', flush=True)\n"

# What Python tells of, and survives: a thread that ends, a thread that fails, a `__del__` that fails, a function that
# fails at exit, and one after it that is called all the same.
SURVIVED = """
for target in (sys.exit, lambda: 1 / 0):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
class A:
    def __del__(self):
        1 / 0
A()
atexit.register(print, "bye")
atexit.register(lambda: 1 / 0)
"""
ENDINGS = {
    "end of the script": (SURVIVED, 0, None),
    "uncaught exception": ("def f(x):\n    return x / 0\ntry:\n    f(1)\nexcept Exception:\n    {}['a']", 1, None),
    "sys.exit(number)": ("atexit.register(print, 'bye')\nsys.exit(3)", 3, None),
    "sys.exit(text)": ("sys.exit('out of coffee')", 1, None),
    "sys.exit(None)": ("sys.exit()", 0, None),
    "raise SystemExit": ("try:\n    {}['a']\nexcept KeyError:\n    raise SystemExit(5)", 5, None),
    "os._exit": ("atexit.register(print, 'bye')\nos._exit(4)", 4, None),
    "os._exit like a signal": ("os._exit(137)", 137, None),
    "KeyboardInterrupt": ("os.kill(os.getpid(), signal.SIGINT)", 130, None),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", 143, None),
    "SIGTERM handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('asked to end'))\nos.kill(os.getpid(), signal.SIGTERM)",
        1,
        None,
    ),
    "SIGHUP": ("signal.signal(signal.SIGHUP, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGHUP)", 129, None),
    "SIGPIPE": ("signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGPIPE)", 141, None),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "TM805"),
    "SIGSEGV": ("import ctypes\nctypes.string_at(0)", 139, "TM801"),
    "SIGABRT": ("os.abort()", 134, "TM802"),
    "SIGFPE": ("os.kill(os.getpid(), signal.SIGFPE)", 136, "TM807"),
    "an error in a console": ("import code\ncode.InteractiveConsole().push('1 / 0')", 0, None),
    "an excepthook of its own": ("sys.excepthook = lambda *_: print('mine')\n1 / 0", 1, None),
}
# Those that leave the interpreter no time for anything: they end in the same way in a process that was forked.
AT_ONCE = {
    "os._exit",
    "os._exit like a signal",
    "SIGTERM",
    "SIGHUP",
    "SIGPIPE",
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "SIGFPE",
}


LIKE_ANOTHER = {
    "sys.exit(None)",
    "sys.exit(text)",
    "raise SystemExit",
    "an error in a console",
    "an excepthook of its own",  # one that fails is in test_hostile_exceptions.py
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_ANOTHER else name for name in ENDINGS]
)
def test_ending(tmp_path: Path, name: str) -> None:
    body, status, code = ENDINGS[name]
    # Without torchmedic it makes no difference whether torch is there, only the time that it takes to import.
    (tmp_path / "train.py").write_text(HEAD.format(module="json") + body)
    plain = plainly(tmp_path, "train.py")
    assert plain.status == status, plain.stderr

    other = ended(tmp_path, name, HEAD.format(module="torch") + body)

    assert (other.status, other.stdout) == (plain.status, plain.stdout), other.stderr
    before, _, diagnosis = other.stderr.partition("\nerror[" if plain.stderr else "error[")
    assert without_addresses(before) == without_addresses(plain.stderr)
    assert diagnosis[:5] == (code or "")


def ended(folder: Path, name: str, source: str) -> Ended:
    """The script under torchmedic, in an interpreter of its own where that has a part in how it ends."""
    if name in AT_ONCE:
        finished = run_script(folder, source)
        return Ended(finished.returncode, finished.stdout, finished.stderr)
    (folder / "train.py").write_text(source)
    return watched(folder, "train.py")


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text).strip()


@pytest.mark.parametrize("error", ["1 / 0", "raise ImportError('half of an installation')"])
def test_a_torch_that_cannot_be_imported(tmp_path: Path, error: str) -> None:
    """The traceback has no frame of ours. A file with the name of a module of Python's own is a usual reason."""
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import inner\n")
    (tmp_path / "torch" / "inner.py").write_text(f"{error}\n")
    plain = plainly(tmp_path, "train.py")
    assert plain.status == 1

    other = watched(tmp_path, "train.py")

    assert (other.status, other.stdout, other.stderr) == (plain.status, plain.stdout, plain.stderr)
