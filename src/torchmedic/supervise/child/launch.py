"""Starts the user's command, with an environment that loads the agent and otherwise as without torchmedic."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torchmedic
from torchmedic.settings import HIDE_VARIABLE, HOME_VARIABLE, RUN_DIR_VARIABLE

_INJECT = Path(torchmedic.__file__).parent / "inject"
_DEPENDENCIES = ("msgspec", "psutil", "rich", "safetensors")
_PR_SET_PDEATHSIG = 1
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def environment(run: Path, *, hide: bool) -> dict[str, str]:
    """The environment of the child.

    Args:
        run: The run folder.
        hide: Whether to hide the added variables from the script's `os.environ`. A launcher such as torchrun copies
            `os.environ` to its workers, so for a launcher they must stay visible.
    """
    added = {
        RUN_DIR_VARIABLE: str(run),
        HOME_VARIABLE: os.pathsep.join(_homes()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_INJECT), os.environ.get("PYTHONPATH", "")])),
    }
    if hide:
        added[HIDE_VARIABLE] = "1"
    return {**os.environ, **added}


def _homes() -> list[str]:
    """The folders that torchmedic and its dependencies were imported from: perhaps entries of PYTHONPATH."""
    found = [str(Path(torchmedic.__file__).parent.parent)]
    for name in _DEPENDENCIES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent.parent))
    return list(dict.fromkeys(found))


def python_command(arguments: Sequence[str]) -> list[str]:
    """The interpreter that runs torchmedic, with its flags, and the given arguments."""
    return [sys.executable, *interpreter_flags(sys.orig_argv), *arguments]


def interpreter_flags(words: Sequence[str]) -> list[str]:
    """The words between the interpreter and its `-m`, `-c` or script on a command line."""
    flags: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_VALUE:
            flags += [word, next(rest, "")]
        elif word.startswith("--"):
            flags.append(word)
        elif word.startswith("-") and word != "-":
            letters, last = _flag_letters(word)
            flags += [letters] if letters != "-" else []
            if last:
                break
        else:
            break
    return flags


def _flag_letters(word: str) -> tuple[str, bool]:
    """The letters of a word such as `-um` without the `m`, and whether the flags end there."""
    for position, letter in enumerate(word):
        if letter in "WX":
            return word, False  # the rest of the word is its value
        if letter in "mc":
            return word[:position], True
    return word, False


def blinding_flag(command: Sequence[str]) -> str | None:
    """The flag of a Python command with which Python does not load the agent: `-I`, `-E` or `-S`."""
    if not os.path.basename(command[0]).startswith("python"):
        return None
    words = [re.split("[WX]", word)[0] for word in interpreter_flags(command) if re.match("-[^-]", word)]
    return next((f"-{letter}" for letter in "".join(words) if letter in "IES"), None)


def start(
    command: Sequence[str], env: dict[str, str], signal_mask: Iterable[signal.Signals | int], **streams: int
) -> subprocess.Popen[bytes]:
    """Start the child with our standard streams, our other open files and the given signal mask.

    `streams` replace our `stdout` and `stderr`.

    In the foreground of a terminal, the child shares our process group, so that Ctrl-C, Ctrl-Z and reads from the
    terminal work as usual. Elsewhere it gets its own group, so that a signal sent to our group reaches it exactly once,
    through us.
    """
    return subprocess.Popen(
        command,
        env=env,
        close_fds=False,
        process_group=None if _in_foreground() else 0,
        preexec_fn=_in_child(set(signal_mask)) if os.name == "posix" else None,  # noqa: PLW1509 - no threads here
        stdout=streams.get("stdout"),
        stderr=streams.get("stderr"),
    )


def _in_foreground() -> bool:
    """Whether our process group is in the foreground of a terminal, which sends Ctrl-C to it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _in_child(mask: set[signal.Signals | int]) -> Callable[[], None]:
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if libc is not None:
            # `kill -9` of torchmedic must end the training too, and leave no orphan.
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    return prepare
