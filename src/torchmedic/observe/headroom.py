"""Room to look around in a process that has used up what its own limit allows."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

_lifted: list[int] = []  # the soft limit, while it is lifted


@contextlib.contextmanager
def headroom() -> Iterator[None]:
    """Lift the soft limit of the address space as far as the hard one while we look, then put it back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == hard or _lifted:
        yield
        return
    try:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    except (ValueError, OSError):
        yield
        return
    _lifted.append(soft)
    try:
        yield
    finally:
        _lifted.clear()
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def address_limit() -> int | None:
    """The limit that the user's code runs under; None for no limit."""
    limit = _lifted[0] if _lifted else resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit in (resource.RLIM_INFINITY, -1) else limit
