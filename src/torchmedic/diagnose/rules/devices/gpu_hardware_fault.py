"""The GPU hardware failed: its memory, its links, or the whole card.

What: the driver reports an error that a program cannot cause by itself: memory with uncorrectable errors, a broken link
between GPUs, a GPU that has fallen off the bus.

Why: failing memory cells, overheating, a faulty power supply or slot, a driver that lost the GPU. A restarted run may
work for a while; the fault tends to return.

Cure: check the health of the GPU (`nvidia-smi -q`, the Xid in the kernel log), reset it or take it out of service, and
continue from a checkpoint on another GPU.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.lost_device.evidence import LostDevice


@rule("TM322", "gpu-hardware-fault")
def check(lost: LostDevice) -> Draft | None:
    if lost.fault.kind not in ("ecc", "hardware"):
        return None
    draft = check.draft(lost, "proven" if lost.health else "likely")
    draft.message = "the GPU reported a fault of its hardware, and the CUDA context is lost"
    draft.cause = lost.fault.words
    draft.mark(lost.noticed, "cause", "the host was notified here; no line of the script is the cause")
    draft.because(*lost.health)
    return draft.help(
        "check the card (`nvidia-smi -q -d ECC,PAGE_RETIREMENT`) and go on from a checkpoint on another one"
    )
