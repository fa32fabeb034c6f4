"""Which GPUs the code of a build runs on, by the list of architectures that it was compiled for."""

from __future__ import annotations

import re
from collections.abc import Iterable


def covers(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether code for some architectures runs on a GPU: that of its own generation, or older PTX."""
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if found is None:
            continue
        major, minor = int(found[2]), int(found[3])
        if found[4] == "a":
            fits = (major, minor) == capability  # of this very chip, as PTX too
        elif found[1] == "compute" and found[4] != "f":
            fits = (major, minor) <= capability
        else:
            fits = major == capability[0] and minor <= capability[1]
        if fits:
            return True
    return False


def covers_without_compiling(archs: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether there is code that the driver need not compile first, which takes minutes."""
    return covers([arch for arch in archs if arch.startswith("sm_")], capability)
