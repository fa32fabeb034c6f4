"""The GPU is working on its queue; the run is not hung.

What: the main thread waits for the GPU, which is working: its utilisation and its power draw are high, or it passes
from one mark of the run to the next.

Why: one very large operation, or a long queue of operations: the host runs ahead of the device, and waits at the first
line that needs a result.

Cure: wait. To find the operation that takes the time, profile a step (`torch.profiler`).
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._device import device_words, power_words, spins, waits_for_device
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import main_line, stall_rule
from torchmedic.records.stall import Stall


@stall_rule("TM556", "long-kernel")
def check(stall: Stall) -> Draft | None:
    if not waits_for_device(stall) or spins(stall):
        return None
    draft = check.draft(stall, "likely")
    draft.message = f"not hung: the GPU is computing, for {duration(stall.still)} so far"
    draft.cause = "the main thread waits for results of the GPU"
    draft.at(main_line(stall, "cause", "the main thread waits for the GPU here"))
    draft.because(*power_words(stall), *device_words(stall))
    draft.help("wait; `torch.profiler` shows which operation takes the time")
    return draft.rated("note")
