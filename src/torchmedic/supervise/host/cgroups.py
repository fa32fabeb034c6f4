"""The cgroups of a process (version 1, version 2 or both), and readers for small files of the kernel."""

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
    """The cgroup of a process and its ancestors, innermost first. The limits of all of them apply.

    Args:
        controller: `memory`, `cpu` or `pids`, which have separate trees in version 1. If there is no such tree, or the
            controller is empty, the tree of version 2 is used.
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
    """The existing folders from a cgroup up to the base.

    In a container, the host's path may not exist; the cgroup is then mounted at the base.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return [base]
    inner = ["/".join([base, *parts[:depth]]) for depth in range(len(parts), 0, -1)]
    return [*filter(os.path.isdir, inner), base]


def text(path: Path | str) -> str | None:
    """The text of a small kernel file; None if it does not exist or may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # takes half as long as `open`
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
    """The number in a file; None for no limit."""
    try:
        value = int(text(path) or "")
    except ValueError:
        return None
    return value if value < _NO_LIMIT else None


def memory_limit(folder: Path | str) -> int | None:
    """The memory limit of a cgroup in bytes: version 2, then version 1."""
    limit = number(f"{folder}/memory.max")
    return number(f"{folder}/memory.limit_in_bytes") if limit is None else limit


def table(path: Path | str, *names: str) -> dict[str, int]:
    """The named numbers of a file that has a name and a number on every line."""
    lines = "\n" + (text(path) or "")
    found = {}
    for name in names:
        rest = lines.partition(f"\n{name} ")[2] or lines.partition(f"\n{name}:")[2]
        value = _NUMBER.match(rest)
        if value is not None:
            found[name] = int(value[1])
    return found
