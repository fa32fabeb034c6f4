"""Memory that has run out, in the words of a library that does not say so.

oneDNN, which computes convolutions and products on the CPU, asks for memory for its code and its work space, and says
the same whatever went wrong. Only where the process is at a limit for certain are its words taken for that.
"""

from __future__ import annotations

import re

from torchmedic.detect.failures.exhaustion import Exhaustion
from torchmedic.observe.memory.host import host_memory
from torchmedic.observe.memory.limits import refusing

_ONEDNN = re.compile(r"could not (create|execute|initialize) a (primitive|memory|sub-memory)")


def hidden_exhaustion(kinds: frozenset[str], text: str) -> Exhaustion | None:
    """What an exception means, by its words and by what the process has left; None if that is not memory."""
    if "RuntimeError" not in kinds or not _ONEDNN.search(text):
        return None
    bound = refusing(host_memory(), None)
    return Exhaustion(where="host") if bound is not None and bound.certain else None
