"""Memory, and numbers of open files, to examine a process that has used up what its own limits allow."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from collections.abc import Iterator

from torchmedic.observe.memory.small_files import bytes_of
from torchmedic.runfolder.descriptors import out_of_the_way

_LIMITS = {"RLIMIT_AS": resource.RLIMIT_AS, "RLIMIT_DATA": resource.RLIMIT_DATA}
_SIZES = ("VmSize", "VmPeak", "VmData", "VmRSS")
_SPARE_BYTES = 2 << 20  # bytes of address space, never touched
_MAX_STACK_BYTES = 64 << 20  # bytes of a thread
_TRACEBACK_BYTES = 8 << 20  # for a traceback as text, and for Python to put it in a queue

_SPARE_FILES = 8  # for modules of ours that are imported, source that is read, and what is written
_MORE_FILES = 64

_lifted: dict[str, int] = {}  # the soft limits, while they are lifted
_widened: dict[str, int] = {}  # the soft limits that the user's code had run under, where they are higher now
_spare: list[mmap.mmap] = []
_spare_files: list[int] = []
_sizes: dict[str, int] = {}  # of the process when it failed, before anything of ours took its part


def reserve(*, for_thread: bool = False) -> None:
    """Set a little room aside, so that a process that has none left can still say so.

    Args:
        for_thread: Whether it takes a thread to say so, as in a DataLoader worker: what we allocate may keep memory
            that the process frees afterwards from going back, and a stack needs a piece of its own.
    """
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    more = _TRACEBACK_BYTES + (stack if 0 < stack <= _MAX_STACK_BYTES else 0) if for_thread else 0
    with contextlib.suppress(OSError, ValueError):
        # Such as counts against the limits of all that is mapped and of all that may be written to.
        _spare[:] = [mmap.mmap(-1, _SPARE_BYTES + more, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
    with contextlib.suppress(OSError):
        while len(_spare_files) < _SPARE_FILES:
            _spare_files.append(out_of_the_way(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)))


def release() -> None:
    """Release the memory that was set aside."""
    if _spare:  # and nothing here that would take memory itself, not even a loop over them
        _spare[0].close()
        _spare.clear()


@contextlib.contextmanager
def headroom(known: dict[str, int] | None = None) -> Iterator[None]:
    """Lift the soft limits of memory as far as the hard ones while we look, then put them back.

    Args:
        known: The sizes of the process that failed, where this is a copy of it.
    """
    if _lifted:
        yield
        return
    with contextlib.suppress(MemoryError):
        _sizes.update(known or _sizes_now())
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        if soft != hard:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(number, (hard, hard))
                _lifted[name] = soft
    files = _make_room_for_files()
    try:
        yield
    finally:
        if files is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for name, soft in _lifted.items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(_LIMITS[name], (soft, resource.getrlimit(_LIMITS[name])[1]))
        _lifted.clear()
        _sizes.clear()


def _make_room_for_files() -> int | None:
    """Where no file can be opened any more: lift the soft limit and give it back, else close what was set aside."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + _MORE_FILES if hard < 0 else min(soft + _MORE_FILES, hard)
    if wanted > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return soft
    while _spare_files:
        with contextlib.suppress(OSError):
            os.close(_spare_files.pop())
    return None


def impose() -> None:
    """Put the limits back for good, in a copy of the process: less what we have taken since."""
    before, now = _sizes.get("VmSize", 0), _sizes_now().get("VmSize", 0)
    ours = max(0, now - before) if before else 0
    for name, soft in _lifted.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(_LIMITS[name], (soft + ours, resource.getrlimit(_LIMITS[name])[1]))
    _lifted.clear()


def widen(nbytes: int) -> None:
    """Leave a process that has failed so much room below its soft limit, if the hard one allows it.

    A worker that can start the thread which sends its exception, but has no memory to send it, would be waited for for
    ever: without us it could not have started it.
    """
    taken = _sizes_now().get("VmSize", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if taken and soft != resource.RLIM_INFINITY and soft - taken < nbytes:
        wanted = taken + nbytes
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
            _widened.setdefault("RLIMIT_AS", soft)


def address_limit() -> int | None:
    """The limit of the address space that the user's code runs under; None for no limit."""
    return _limit("RLIMIT_AS")


def data_limit() -> int | None:
    """The limit of what a process may map for itself to write to; None for no limit."""
    return _limit("RLIMIT_DATA")


def is_lifted(name: str) -> bool:
    """Whether a limit is lifted at the moment."""
    return name in _lifted


def has_room(nbytes: int) -> bool:
    """Whether the limit of the address space leaves that much, as it nearly always does."""
    limit = address_limit()
    return limit is None or limit - _sizes_now().get("VmSize", 0) > nbytes


def sizes() -> dict[str, int]:
    """`VmSize` and its like, in bytes: of the moment of the failure while one is looked at, else of now."""
    return dict(_sizes) or _sizes_now()


def sizes_and_limits() -> dict[str, int]:
    """Sizes and limits of this process, in bytes, for another process to read."""
    limits = {name: limit for name in _LIMITS if (limit := _limit(name)) is not None}
    return {name: value for name, value in sizes().items() if name in _SIZES} | limits


def _sizes_now() -> dict[str, int]:
    found = {}
    for line in bytes_of("/proc/self/status").splitlines():
        name, _, rest = line.partition(b":")
        number, _, unit = rest.strip().partition(b" ")
        if unit == b"kB" and number.isdigit():
            found[name.decode()] = int(number) * 1024
    return found


def _limit(name: str) -> int | None:
    known = _widened.get(name, _lifted.get(name))
    limit = known if known is not None else resource.getrlimit(_LIMITS[name])[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit
