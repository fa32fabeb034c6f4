"""A page of a mapped file or of shared memory could not be had.

What: the process used memory that is backed by a file, and the kernel could not give it the page (SIGBUS).

Why: shared memory is full: DataLoader workers hand batches over through /dev/shm, which containers often limit to
64 MB. Or a file that is mapped into memory (`np.memmap`, `torch.load(mmap=True)`, safetensors) was cut short or
replaced while it was in use, or lies on a disk or network drive that failed.

Cure: give the container more shared memory (`docker run --shm-size=8g` or `--ipc=host`), use fewer workers or smaller
batches, or `torch.multiprocessing.set_sharing_strategy("file_system")`. Never rewrite a mapped file in place: write a
new one and rename it.
"""

from __future__ import annotations

from torchmedic.diagnose.last_words import draft_of, line_grade, size, step_of, who
from torchmedic.diagnose.rule import Rule
from torchmedic.records import Death, Diagnosis

CODE, NAME = "TM803", "bus-error"

_FULL = 1 << 20  # bytes: less than one page of a batch


def check(death: Death) -> Diagnosis | None:
    if death.signal != "SIGBUS":
        return None
    full = death.shm_low is not None and death.shm_low < _FULL
    draft = draft_of(
        death,
        CODE,
        NAME,
        "proven" if full else line_grade(death),
        f"{who(death)} died of a bus error" + (": shared memory is full" if full else ""),
        "/dev/shm had no room for the page that was written (SIGBUS)"
        if full
        else "the page of a mapped file or of shared memory could not be had (SIGBUS)",
    )
    if death.shm_low is not None:
        draft.because(f"least free space in /dev/shm in the last seconds: {size(death.shm_low)}")
    if full:
        draft.help("give the container more shared memory: `docker run --shm-size=8g`, or `--ipc=host`")
        draft.help("use fewer DataLoader workers, a smaller batch or a smaller `prefetch_factor`")
    else:
        draft.help("look for a mapped file that was cut short or replaced while in use; write a new one and rename it")
    return draft.done(step=step_of(death), rank=death.rank)


RULE = Rule(CODE, NAME, check)
