"""How the user's command is started: as without torchmedic, but for the environment that brings in the agent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torchmedic
from torchmedic.settings import HIDE_VARIABLE, HOME_VARIABLE, RUN_DIR_VARIABLE

_INJECT = Path(torchmedic.__file__).parent / "inject"
_PR_SET_PDEATHSIG = 1


def environment(run: Path, *, hide: bool) -> dict[str, str]:
    """The environment of the child.

    Args:
        run: The run folder.
        hide: Whether `os.environ` of the script shall not show what is added. A launcher such as torchrun copies
            `os.environ` to its workers, so there it must stay visible.
    """
    added = {
        RUN_DIR_VARIABLE: str(run),
        HOME_VARIABLE: str(Path(torchmedic.__file__).parent.parent),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_INJECT), os.environ.get("PYTHONPATH", "")])),
    }
    if hide:
        added[HIDE_VARIABLE] = "1"
    return {**os.environ, **added}


def python_command(arguments: Sequence[str]) -> list[str]:
    """The interpreter that runs us, with the flags that it was given, and these arguments."""
    return [sys.executable, *_interpreter_flags(), *arguments]


def _interpreter_flags() -> list[str]:
    # Those that change how the script behaves; `-c`, `-m` and the script itself are not among them.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.stdout, "write_through", False) and "-u" not in flags:
        flags.append("-u")
    return list(flags)


def start(command: Sequence[str], env: dict[str, str], blocked: Iterable[signal.Signals]) -> subprocess.Popen[bytes]:
    """Start the child with our standard streams.

    Where standard input is a terminal, the child shares our process group: Ctrl-C and Ctrl-Z reach it from the
    terminal itself. Everywhere else it gets a group of its own, so that a signal sent to ours reaches it exactly once,
    through us.
    """
    return subprocess.Popen(
        command,
        env=env,
        process_group=None if _on_terminal() else 0,
        preexec_fn=_in_child(set(blocked)) if os.name == "posix" else None,  # noqa: PLW1509 - no threads here
    )


def _on_terminal() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _in_child(blocked: set[signal.Signals]) -> Callable[[], None]:
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        if libc is not None:
            # Should we be killed, the training is told to end, as it would be with its shell.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    return prepare
