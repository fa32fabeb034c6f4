"""Room to look around in a process that has used up what its own limits allow."""

from __future__ import annotations

import contextlib
import mmap
import resource
from collections.abc import Iterator

_LIMITS = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}
_TOLD = ("VmSize", "VmPeak", "VmData", "VmRSS")
_SPARE = 2 << 20  # bytes of address space, never touched

_lifted: dict[str, int] = {}  # the soft limits, while they are lifted
_spare: list[mmap.mmap] = []
_sizes: dict[str, int] = {}  # of the process when it failed, before anything of ours took its part


def reserve() -> None:
    """Set a little room aside, so that a process that has none left can still say so."""
    with contextlib.suppress(OSError, ValueError):
        _spare[:] = [mmap.mmap(-1, _SPARE)]


def release() -> None:
    """Give up the room that was set aside."""
    for room in _spare:
        with contextlib.suppress(BufferError):
            room.close()
    _spare.clear()


@contextlib.contextmanager
def headroom() -> Iterator[None]:
    """Lift the soft limits of memory as far as the hard ones while we look, then put them back."""
    if _lifted:
        yield
        return
    with contextlib.suppress(MemoryError):
        _sizes.update(_sizes_now())
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        if soft != hard:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(number, (hard, hard))
                _lifted[name] = soft
    try:
        yield
    finally:
        for name, soft in _lifted.items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(_LIMITS[name], (soft, resource.getrlimit(_LIMITS[name])[1]))
        _lifted.clear()
        _sizes.clear()


def address_limit() -> int | None:
    """The limit of the address space that the user's code runs under; None for no limit."""
    return _limit("RLIMIT_AS")


def data_limit() -> int | None:
    """The limit of what a process may map for itself to write to; None for no limit."""
    return _limit("RLIMIT_DATA")


def is_lifted(name: str) -> bool:
    """Whether a limit is out of our way while we look."""
    return name in _lifted


def has_room(nbytes: int) -> bool:
    """Whether the limit of the address space leaves that much, as it nearly always does."""
    limit = address_limit()
    return limit is None or limit - _sizes_now().get("VmSize", 0) > nbytes


def sizes() -> dict[str, int]:
    """`VmSize` and its like, in bytes: of the moment of the failure while one is looked at, else of now."""
    return dict(_sizes) or _sizes_now()


def sizes_and_limits() -> dict[str, int]:
    """The same with the limits that there are, for another process to read."""
    limits = {name: limit for name in _LIMITS if (limit := _limit(name)) is not None}
    return {name: value for name, value in sizes().items() if name in _TOLD} | limits


def _sizes_now() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError), open("/proc/self/status", "rb", buffering=0) as file:
        for line in file.read().splitlines():
            name, _, rest = line.partition(b":")
            number, _, unit = rest.strip().partition(b" ")
            if unit == b"kB" and number.isdigit():
                found[name.decode()] = int(number) * 1024
    return found


def _limit(name: str) -> int | None:
    limit = _lifted[name] if name in _lifted else resource.getrlimit(_LIMITS[name])[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit
