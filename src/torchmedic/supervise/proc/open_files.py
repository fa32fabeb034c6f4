"""The open files of processes, and who else has them open."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

import msgspec

from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.proc.process import PROC


class OpenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A descriptor of a process."""

    pid: int
    descriptor: int
    target: str


def target(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    """What a descriptor stands for: a path, `pipe:[inode]`, `socket:[inode]`. Empty if that is not for us."""
    with contextlib.suppress(OSError):
        return os.readlink(f"{proc}/{pid}/fd/{descriptor}")
    return ""


def is_named_pipe(pid: int, descriptor: int, *, proc: Path = PROC) -> bool:
    """Whether a path of the file system is behind a descriptor, and a pipe behind that."""
    with contextlib.suppress(OSError, ValueError):
        return descriptor >= 0 and stat.S_ISFIFO(os.stat(f"{proc}/{pid}/fd/{descriptor}").st_mode)
    return False


def info(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    return text(f"{proc}/{pid}/fdinfo/{descriptor}") or ""


def mode(pid: int, descriptor: int, *, proc: Path = PROC) -> str:
    """`r`, `w` or `rw`; empty if that is not known."""
    flags = info(pid, descriptor, proc=proc).partition("flags:")[2].split(maxsplit=1)
    with contextlib.suppress(ValueError, IndexError):
        return ("r", "w", "rw", "")[int(flags[0], 8) & 3]
    return ""


def holders(targets: Collection[str], *, proc: Path = PROC) -> dict[str, list[OpenFile]]:
    """All descriptors of all processes that we may look into for these targets: one walk over the host."""
    found: dict[str, list[OpenFile]] = {each: [] for each in targets if each}
    if not found:
        return found
    with contextlib.suppress(OSError):
        for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit()):
            folder = f"{proc}/{pid}/fd"
            with contextlib.suppress(OSError):
                for entry in os.listdir(folder):
                    with contextlib.suppress(OSError):
                        link = os.readlink(f"{folder}/{entry}")
                        if link in found:
                            found[link].append(OpenFile(pid=pid, descriptor=int(entry), target=link))
    return found
