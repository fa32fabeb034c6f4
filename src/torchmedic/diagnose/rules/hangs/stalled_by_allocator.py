"""GPU memory is so full that the allocator frees its cache and allocates it again all the time.

What: the allocator of PyTorch finds no free memory, returns its whole cache to the driver and retries. The retry
succeeds, so there is no error, but it happens many times a second, waits for the device each time, and steps take much
longer.

Why: the step needs nearly all of the memory, with sizes that change from step to step, so the cached blocks never fit:
fragmentation.

Cure: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, use a slightly smaller batch, pad to a few fixed sizes, or
end another process that holds memory on the same GPU.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import main_line, stall_rule
from torchmedic.records.stall import Stall

_MIN_RETRIES_PER_SECOND = 1.0  # a second


@stall_rule("TM526", "stalled-by-allocator")
def check(stall: Stall) -> Draft | None:
    inner = stall.inner
    rate = inner.allocator_retry_rate if inner is not None else None
    if inner is None or rate is None or rate < _MIN_RETRIES_PER_SECOND:
        return None
    draft = check.draft(stall, "likely")
    draft.message = (
        "the run is slow because the GPU's memory is nearly full, and the allocator empties its cache again and again"
    )
    draft.cause = f"the allocator gave all its cached memory back and asked anew {rate:.0f} times a second"
    draft.at(main_line(stall, "cause", "the main thread is here"))
    draft.because(f"{inner.allocator_retries} times since the start" if inner.allocator_retries else "")
    draft.help("set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before the start")
    draft.help("a smaller batch, or inputs padded to a few fixed sizes")
    return draft.rated("warning")
