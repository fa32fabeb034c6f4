"""Warnings about a holder while it grew, and how much the process grew meanwhile: proof where the bytes hide.

Small pieces that are kept between large ones that are freed keep the heap of the host in pieces: then little is held,
and yet it is what fills the memory.
"""

from __future__ import annotations

from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.source.fillers import Filler
from torchmedic.runfolder.files import read_diagnoses


def was_warned(autopsy: Autopsy, filler: Filler, codes: tuple[str, ...]) -> bool:
    """Whether one of these warnings named the line that fills it."""
    if autopsy.agent is None:
        return False
    here = filler.location("cause", "")
    told = [each.cause_location for each in read_diagnoses(autopsy.agent.open().path).values() if each.code in codes]
    return any(each is not None and (each.file, each.line) == (here.file, here.line) for each in told)


def grown_meanwhile(autopsy: Autopsy) -> int:
    """Bytes by which the process grew between the first look at its holders and the last."""
    looks = autopsy.agent.leaks.looks if autopsy.agent is not None else []
    sizes = [each.device if autopsy.exhaustion.on_device else each.rss for each in looks]
    return max(0, sizes[-1] - sizes[0]) if sizes else 0
