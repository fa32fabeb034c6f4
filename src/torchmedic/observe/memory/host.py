"""What the process holds of the host's memory, and which limits it is under; read seldom."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from torchmedic.observe.memory.headroom import address_limit, data_limit, sizes
from torchmedic.observe.memory.small_files import bytes_of
from torchmedic.settings import CGROUP_VARIABLE

_PROC = Path("/proc")
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """In bytes; None where the host does not say.

    Sizes of the process are those of the moment at which it failed, while a failure is looked at. `committed` is what
    the kernel has promised to all processes, of `commit_limit`, where it promises no more than it has.
    """

    resident: int | None = None
    address_space: int | None = None
    address_peak: int | None = None
    data: int | None = None
    total: int | None = None
    available: int | None = None
    swap: int | None = None
    address_limit: int | None = None
    data_limit: int | None = None
    cgroup_limit: int | None = None
    committed: int | None = None
    commit_limit: int | None = None


def host_memory(proc: Path = _PROC, cgroups: Path | None = None) -> HostMemory:
    """Read the memory of this process and of its host."""
    cgroups = cgroups or Path(os.environ.get(CGROUP_VARIABLE, "/sys/fs/cgroup"))
    status = sizes() if proc == _PROC else _table(proc / "self" / "status")
    host = _table(proc / "meminfo")
    strict = text_of(proc / "sys" / "vm" / "overcommit_memory").strip() == "2"
    return HostMemory(
        resident=status.get("VmRSS"),
        address_space=status.get("VmSize"),
        address_peak=status.get("VmPeak"),
        data=status.get("VmData"),
        total=host.get("MemTotal"),
        available=host.get("MemAvailable"),
        swap=host.get("SwapTotal"),
        address_limit=address_limit(),
        data_limit=data_limit(),
        committed=host.get("Committed_AS") if strict else None,
        commit_limit=host.get("CommitLimit") if strict else None,
        cgroup_limit=_cgroup_limit(proc, cgroups),
    )


def free_bytes(proc: Path = _PROC, cgroups: Path | None = None) -> int:
    """How much this process can still take: of the host's memory, and below the limit of its cgroup."""
    memory = host_memory(proc, cgroups)
    free = memory.available or 0
    if memory.cgroup_limit is not None:
        free = min(free, max(0, memory.cgroup_limit - (memory.resident or 0)))
    return free


def _table(path: Path) -> dict[str, int]:
    """Lines such as `VmRSS:  1234 kB`."""
    found = {}
    for line in text_of(path).splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            found[name] = int(number) * 1024
    return found


def text_of(path: Path) -> str:
    """The text of a small file; empty where it cannot be read."""
    return bytes_of(str(path)).decode(errors="replace")


def _cgroup_limit(proc: Path, cgroups: Path) -> int | None:
    """The smallest limit of the groups that the process is in: version 2, or the memory controller of version 1."""
    limits = []
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = cgroups / "memory" if controllers else cgroups
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            with contextlib.suppress(ValueError):
                limits.append(int(text_of(folder / name)))
            if folder == base:
                break
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def free_space(path: str) -> tuple[int, int, int] | None:
    """Free and total bytes, and free inodes, of the file system that holds a path or would hold it."""
    folder = os.path.abspath(path)
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail
    return None
