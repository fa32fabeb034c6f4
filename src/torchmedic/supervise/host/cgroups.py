"""The control groups that a process is in, of version 1, version 2 or both at once, and how their files are read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torchmedic.settings import CGROUP_VARIABLE

_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a huge number
_NUMBER = re.compile(r"[ \t]*(\d+)")


def default_root() -> Path:
    return Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup"))


def folders(controller: str, listing: Path | str, root: Path | str) -> list[str]:
    """The group of a process and the groups around it, innermost first; a limit of any of them holds.

    Args:
        controller: `memory`, `cpu` or `pids`, which has a tree of its own in version 1. Where it has none, or is empty,
            the one tree of version 2.
        listing: `/proc/PID/cgroup`.
        root: Where the trees are mounted.
    """
    unified: list[str] = []
    for line in (text(listing) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if controller and controller in controllers.split(","):
            # Debian's `cpu,cpuacct` has a link `cpu`, which a container need not have.
            base = f"{root}/{controller}"
            return _upwards(base if os.path.isdir(base) else f"{root}/{controllers}", path)
        if colon and not controllers:
            # Beside trees of version 1 it is mounted one level lower.
            base = f"{root}/unified"
            unified = _upwards(base if os.path.isdir(base) else str(root), path)
    return unified


def _upwards(base: str, path: str) -> list[str]:
    """In a container the path of the host may not exist; the group is then mounted at the base."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return [base]
    inner = ["/".join([base, *parts[:depth]]) for depth in range(len(parts), 0, -1)]
    return [*filter(os.path.isdir, inner), base]


def text(path: Path | str) -> str | None:
    """A small file of the kernel's; None if there is none, or it is not for us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # half the time that `open` takes
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")


def number(path: Path | str) -> int | None:
    """A file that holds one number; None for no limit."""
    try:
        value = int(text(path) or "")
    except ValueError:
        return None
    return value if value < _NO_LIMIT else None


def memory_limit(folder: Path | str) -> int | None:
    """What a group may hold at most: version 2, then version 1."""
    limit = number(f"{folder}/memory.max")
    return number(f"{folder}/memory.limit_in_bytes") if limit is None else limit


def table(path: Path | str, *names: str) -> dict[str, int]:
    """Those numbers, by name, of a file with a name and a number on every line."""
    lines = "\n" + (text(path) or "")
    found = {}
    for name in names:
        rest = lines.partition(f"\n{name} ")[2] or lines.partition(f"\n{name}:")[2]
        value = _NUMBER.match(rest)
        if value is not None:
            found[name] = int(value[1])
    return found
