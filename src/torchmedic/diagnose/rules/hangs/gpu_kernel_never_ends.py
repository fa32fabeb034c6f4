"""A kernel on the GPU does not end.

What: the main thread waits for the GPU. The GPU reports that it is busy all the time, draws little more power than when
idle, and does not access memory: a kernel is in an endless loop.

Why: a loop in a custom kernel (CUDA, Triton) that never ends, for some input or for NaN; a kernel that waits for
another kernel (a grid barrier, a lock in memory, a signal of another GPU) which cannot run.

Cure: the diagnosis shows the line that waits and the pass that the device is executing. Run that operation alone, with
the same input; `CUDA_LAUNCH_BLOCKING=1` makes the host wait at the exact line. Limit the loops and waits of custom
kernels.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._device import device_words, last_mark, power_words, spins, waits_for_device
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import main_line, stall_rule
from torchmedic.records.stall import Stall


@stall_rule("TM530", "gpu-kernel-never-ends")
def check(stall: Stall) -> Draft | None:
    if not waits_for_device(stall) or not spins(stall):
        return None
    draft = check.draft(stall, "likely")
    draft.message = f"a kernel has been on the GPU for {duration(stall.still)} and seems to be in an endless loop"
    draft.cause = "the GPU is busy all the time, but draws little power and does not access memory"
    draft.at(main_line(stall, "cause", "the main thread waits for the GPU here"), last_mark(stall))
    draft.because(*power_words(stall), *device_words(stall))
    draft.help("run with CUDA_LAUNCH_BLOCKING=1 to see at which line the kernel is launched")
    return draft.help("limit the loops and waits in your own kernels")
