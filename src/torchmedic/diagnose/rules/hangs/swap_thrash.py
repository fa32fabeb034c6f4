"""The host has too little memory, and swaps.

What: most of the time, all processes on the host (or in the container) wait for memory to be read back from disk. The
run is not hung, but hundreds of times slower than it should be, and becomes slower.

Why: the run and its workers need more memory than there is: many DataLoader workers with a copy of the dataset each,
`pin_memory`, a growing list, another job on the same host.

Cure: use fewer workers, a smaller `prefetch_factor`, memory-mapped data (`np.load(..., mmap_mode="r")`), and no large
Python lists in the dataset, which every worker copies. To see which process uses the memory: `ps aux --sort -rss`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.stall import command, main_line, stall_rule
from torchmedic.records.stall import Stall

_MIN_SHARE_WAITING = 0.2  # of the time, all of the tasks waited for memory
_MIN_SWAP_BYTES_PER_SECOND = 4 << 20  # bytes a second
_MIN_FAULTS_PER_SECOND = 100.0  # a second


@stall_rule("TM525", "swap-thrash")
def check(stall: Stall) -> Draft | None:
    rates = stall.pressure
    if rates is None:
        return None
    stood = max(rates.memory_full or 0.0, rates.group_memory_full or 0.0)
    swapped, faults = rates.swap_in or 0.0, rates.major_faults or 0.0
    if stood < _MIN_SHARE_WAITING or (swapped < _MIN_SWAP_BYTES_PER_SECOND and faults < _MIN_FAULTS_PER_SECOND):
        return None
    draft = check.draft(stall, "likely")
    draft.message = "the run is slow because the host has too little memory and swaps"
    draft.cause = f"for {stood:.0%} of the time nothing could run, as everything waited for memory"
    draft.at(main_line(stall, "cause", "the main thread is here"))
    draft.because(f"{size(int(swapped))} a second are read back from swap" if swapped else "")
    draft.because(f"{faults:.0f} times a second the run waits for a page from disk" if faults else "")
    host = stall.host
    if host is not None and host.memory_total and host.memory_available is not None:
        draft.because(f"{size(host.memory_available)} of {size(host.memory_total)} are free on the host")
    if host is not None and host.memory_limit and host.memory_current is not None:
        draft.because(f"{size(host.memory_current)} of the limit of {size(host.memory_limit)} are used by this group")
    largest = sorted(stall.processes, key=lambda process: -(process.rss + process.swap))[:3]
    for process in largest:
        swap = f", {size(process.swap)} swapped out" if process.swap else ""
        draft.because(f"{command(process, process.pid)}: {size(process.rss)}{swap}")
    draft.help("fewer DataLoader workers, a smaller `prefetch_factor` or batch, memory-mapped data")
    return draft.rated("warning")
