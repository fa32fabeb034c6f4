"""The GPU itself failed: its memory, its links, or the card as a whole.

What: the driver reports an error that no program can cause by itself: memory whose error correction gave up, a broken
link between cards, a card that has fallen off the bus.

Why: failing memory cells, overheating, a power supply or a slot that does not hold, a driver that lost the card. A run
that is started again may work for a while; the fault tends to come back.

Cure: look at the health of the card (`nvidia-smi -q`, the Xid in the kernel's log), reset it or take it out of
service, and go on from a checkpoint on another one.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Rule
from torchmedic.evidence.lost_device.evidence import LostDevice
from torchmedic.records import Diagnosis

CODE, NAME = "TM322", "gpu-hardware-fault"


def check(lost: LostDevice) -> Diagnosis | None:
    if lost.fault.kind not in ("ecc", "hardware"):
        return None
    draft = RULE.draft(
        lost,
        "proven" if lost.health else "likely",
        "the GPU reported a fault of its hardware, and the CUDA context is lost",
        lost.fault.words,
    )
    if lost.noticed is not None:
        draft.at(lost.noticed.location("cause", "the host learned of it here; no line of the script is to blame"))
    draft.because(*lost.health)
    draft.help("check the card (`nvidia-smi -q -d ECC,PAGE_RETIREMENT`) and go on from a checkpoint on another one")
    return draft.done()


RULE = Rule(CODE, NAME, check)
