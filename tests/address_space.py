"""Scripts that may have only so much more address space than they have when they ask: how they begin."""

from __future__ import annotations

HEAD_WITH_ROOM = """
import resource
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
def room(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, -1))
"""


def marked(source: str) -> list[int]:
    """The lines that are to blame."""
    return [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# <- cause")]
