"""Flags of the interpreter that started us, and which signals are passed on."""

from __future__ import annotations

import signal

import pytest

from torchmedic.supervise.child.launch import blinding_flag, interpreter_flags
from torchmedic.supervise.child.signals import FORWARDED, shell_status


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("python -m torchmedic run a.py -u", []),
        ("python /venv/bin/torchmedic run a.py", []),
        ("python -u -O -m torchmedic run a.py", ["-u", "-O"]),
        ("python -um torchmedic run a.py", ["-u"]),
        ("python -OOBm torchmedic run", ["-OOB"]),
        ("python -W error -Xdev -X importtime -m torchmedic run", ["-W", "error", "-Xdev", "-X", "importtime"]),
        ("python -Werror::mycat -c pass", ["-Werror::mycat"]),
        ("python --check-hash-based-pycs always -I -m torchmedic", ["--check-hash-based-pycs", "always", "-I"]),
        ("python", []),
    ],
)
def test_flags(words: str, flags: list[str]) -> None:
    assert interpreter_flags(words.split()) == flags


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("/usr/bin/python3 -I train.py", "-I"),
        ("python -uE -m train", "-E"),
        ("python -S -W ignore train.py", "-S"),
        ("python -WIgnore -X dev train.py -I", None),
        ("python -P -s -m train -E", None),
        ("torchrun -I train.py", None),
        ("python", None),
    ],
)
def test_flags_with_which_the_agent_is_not_loaded(words: str, flag: str | None) -> None:
    assert blinding_flag(words.split()) == flag


def test_what_is_passed_on() -> None:
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT} <= FORWARDED
    assert FORWARDED.isdisjoint({signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD, signal.SIGTSTP})


def test_statuses() -> None:
    assert [shell_status(status) for status in (0, 3, -9, -15)] == [0, 3, 137, 143]
