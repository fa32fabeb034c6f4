"""Keeps files of the working folder and of a run folder from being imported as modules of torchmedic's own processes.

A file `json.py` or `torch.py` beside a script is a module of the script. Python puts the working folder in front of the
installed packages for `python -m`, and the entries of PYTHONPATH too. For the processes of torchmedic, the working
folder is removed, and PYTHONPATH comes after the installed packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

# The folder that contains the package; it is found without the search path once it has been imported.
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NAME = "torchmedic"
_START = "import sys; sys.path += {path!r}; sys.argv[:] = sys.argv[1:]; import runpy; "
_MODULE = _START + "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
_SCRIPT = _START + "runpy.run_path(sys.argv[0], run_name='__main__')"


def leave_working_folder() -> None:
    """Change the search path of this process if it runs the command `torchmedic` or `python -m torchmedic`."""
    if _is_own_process(sys.orig_argv, sys.argv):
        given = _given(os.environ)
        inside = os.path.realpath(os.getcwd()) if _has_working_folder() else ""
        rest = [entry for entry in sys.path if entry and os.path.realpath(entry) != inside]
        sys.path[:] = [entry for entry in rest if entry not in given] + [entry for entry in rest if entry in given]


def _is_own_process(words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether the command line is that of torchmedic. Python sets the first argument to `-m` while it imports."""
    if not arguments:
        return False
    if arguments[0] != "-m":
        return os.path.basename(arguments[0]) in (_NAME, f"{_NAME}.exe", f"{_NAME}-script.py")
    for flag, module in zip(words, [*words[1:], ""], strict=True):
        if flag.startswith("-") and not flag.startswith("--") and "m" in flag:
            return (flag.partition("m")[2] or module).partition(".")[0] == _NAME
    return False


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _given(environ: Mapping[str, str]) -> list[str]:
    """The entries of PYTHONPATH as absolute paths, without the working folder."""
    if not _has_working_folder():
        return []
    inside = os.path.realpath(os.getcwd())
    entries = [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [entry for entry in entries if os.path.realpath(entry) != inside]


def module_command(module: str, *arguments: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The command that runs a module of torchmedic. Paths in the arguments must be absolute."""
    return [*_python(_MODULE, environ), module, *arguments]


def script_command(script: str) -> list[str]:
    """The command that runs a script of torchmedic's making, without the files beside it. The path must be absolute."""
    return [*_python(_SCRIPT, os.environ), script]


def _python(start: str, environ: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-P", "-c", start.format(path=[*_given(environ), _HOME])]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for such a command."""
    return {
        name: value for name, value in environ.items() if name != "PYTHONPATH" and not name.startswith("TORCHMEDIC_")
    }


def folder() -> str:
    """The working folder for such a command: neither the user's nor a run folder."""
    return os.path.abspath(os.sep)
