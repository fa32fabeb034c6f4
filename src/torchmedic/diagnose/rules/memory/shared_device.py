"""Another process holds the memory that is missing on this device.

What: the allocation would have fitted without the memory that other processes hold on the device.

Why: a notebook kernel that is still alive, a run that was not ended, a worker or a rank that was given the same device,
a job of another user.

Cure: end the other process (`nvidia-smi` lists them), or choose another device with `CUDA_VISIBLE_DEVICES`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence

_MIN_SHARE_OF_DEVICE = 0.1  # of the device
_CONTEXT = 2 << 30  # bytes


@rule("TM410", "shared-device")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None or not autopsy.exhaustion.on_device or autopsy.asked is None:
        return None
    measured = autopsy.measured
    if measured.capacity is None or measured.free is None:
        return None
    if measured.limit is not None and measured.reserved + autopsy.asked > measured.limit:
        return None  # the process has come to a limit of its own
    # No context comes near this: what is beyond it, others hold.
    others = measured.others if measured.others is not None else max(0, measured.outside - _CONTEXT)
    if others < _MIN_SHARE_OF_DEVICE * measured.capacity or others + measured.free < autopsy.asked:
        return None
    draft = check.draft(evidence, "proven" if measured.others is not None else "likely")
    draft.message = f"other processes hold {size(others)} of the device's {size(measured.capacity)}"
    draft.cause = (
        f"{size(autopsy.asked)} were asked for, {size(measured.free)} were free: it would fit without the others"
    )
    draft.at(*evidence.at_user_line("cause", f"{size(autopsy.asked)} were refused here"))
    draft.because(*(f"process {pid} holds {size(use)}" for pid, use in autopsy.exhaustion.other_processes[:4]))
    shown(draft, autopsy)
    return draft.help("end the other processes (`nvidia-smi` lists them), or use another device (CUDA_VISIBLE_DEVICES)")
