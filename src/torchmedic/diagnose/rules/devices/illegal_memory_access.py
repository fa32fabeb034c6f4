"""A GPU kernel read or wrote an invalid memory address.

What: a kernel used an address outside its memory, an unaligned address, or code that the device cannot run. The device
stops, the CUDA context is lost, and the host is notified at some later line.

Why: almost always a kernel that is not part of torch: a custom CUDA or Triton kernel whose index runs past the end of a
tensor, that is launched with too many threads, that is given a tensor with another dtype or layout (not contiguous), or
a tensor that was freed while the kernel was still running on another stream. Occasionally a bug in a library, or
failing hardware.

Cure: check the kernels between the two lines that are named. Check their bounds and strides;
`compute-sanitizer python train.py` names the thread and the address.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.lost_device.evidence import LostDevice

_WHAT = {
    "illegal_address": "a GPU kernel accessed an invalid memory address",
    "misaligned_address": "a kernel on the GPU used an address that is not aligned",
    "launch_failure": "a kernel on the GPU failed while it ran",
    "launch_timeout": "a kernel on the GPU ran longer than the system allows, and was ended",
}


@rule("TM321", "illegal-memory-access")
def check(lost: LostDevice) -> Draft | None:
    if lost.fault.kind not in _WHAT or lost.is_assertion:
        return None
    trail = lost.trail
    draft = check.draft(lost, "likely" if trail is not None and trail.blamed else "possible")
    draft.message = f"{_WHAT[lost.fault.kind]}, and the CUDA context is lost"
    draft.cause = trail.words if trail is not None else "the progress of the device is not known"
    if trail is not None:
        draft.at(*trail.places)
    draft.at(lost.surfaced)
    draft.because(f"{lost.fault.words}" if lost.fault.words else "")
    draft.because(*lost.health)
    if lost.step is not None and lost.played is not None and lost.played.error is None:
        draft.because(f"{lost.how_it_was_run}, and did not fail: no index or label of the batch is out of range")
    if lost.fault.kind == "launch_timeout":
        draft.help("a GPU that drives a display ends long kernels: do less per kernel, or use one without a display")
    else:
        draft.help("run `compute-sanitizer python train.py`: it names the kernel, the thread and the address")
    return draft
