"""OpenMP may not have as many threads as the work waits for.

What: `OMP_THREAD_LIMIT` (or a library's own limit) allows fewer threads than torch divides its work for. Code that
meets at a barrier then waits for threads that are never started. It looks busy: the waiting burns a whole core.

Why: a scheduler or a container image sets `OMP_THREAD_LIMIT`, while `OMP_NUM_THREADS` or `torch.set_num_threads` asks
for more. Convolutions in `loss.backward()` are where it mostly shows.

Cure: unset `OMP_THREAD_LIMIT`, or ask for no more threads than it allows.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Rule
from torchmedic.diagnose.words.stall import StallDraft, at, busy, stands
from torchmedic.records import Diagnosis
from torchmedic.records.stall import Stall

CODE, NAME = "TM505", "openmp-team-too-small"


def check(stall: Stall) -> Diagnosis | None:
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        limit = process.environment.get("OMP_THREAD_LIMIT", "")
        if view is None or not limit.isdecimal() or not stands(view) or not busy(process):
            continue
        threads, thread = view.torch_threads or 1, view.main
        if thread is None or threads <= int(limit):
            continue
        draft = StallDraft(
            RULE,
            stall,
            "likely",
            f"torch divides its work for {threads} threads, but OpenMP may have only {limit}",
            f"OMP_THREAD_LIMIT={limit}: a barrier waits for threads that are never started, and spins",
        )
        draft.at(at(thread.user_frame, "cause", "this never comes back"))
        draft.because(f"at one and the same instruction in all looks, while using {process.busy:.0%} of a core")
        draft.because(f"OMP_THREAD_LIMIT={limit}, torch.get_num_threads() is {threads}")
        draft.help(f"unset OMP_THREAD_LIMIT, or `torch.set_num_threads({limit})`")
        return draft.finish()
    return None


RULE = Rule(CODE, NAME, check)
