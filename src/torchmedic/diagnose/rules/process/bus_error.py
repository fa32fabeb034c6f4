"""The kernel could not provide a page of a mapped file or of shared memory.

What: the process accessed memory that is backed by a file, and the kernel could not provide the page (SIGBUS).

Why: a file that is mapped into memory (`np.memmap`, `torch.load(mmap=True)`, safetensors) was truncated or replaced
while it was in use, or is on a disk or network drive that failed. Or /dev/shm was full for a moment (TM415, if that was
observed).

Cure: never rewrite a mapped file in place: write a new file and rename it. Give the container more shared memory
(`docker run --shm-size=8g` or `--ipc=host`), if it has little.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.process._fatal_signals import died_of
from torchmedic.diagnose.words.format import size
from torchmedic.records.death import Death

_SMALL_SHM_BYTES = 256 << 20  # bytes: a batch of every worker may well be more


@rule("TM803", "bus-error")
def check(death: Death) -> Draft | None:
    draft = died_of("SIGBUS", check, death)
    if draft is None:
        return None
    if death.shm_low is not None:
        of = f" of {size(death.shm_size)}" if death.shm_size else ""
        draft.because(f"least free space in /dev/shm in the last seconds: {size(death.shm_low)}{of}")
    draft.help("look for a mapped file that was cut short or replaced while in use; write a new one and rename it")
    if death.shm_size is not None and death.shm_size < _SMALL_SHM_BYTES:
        draft.help("give the container more shared memory: `docker run --shm-size=8g`, or `--ipc=host`")
    return draft
