"""OpenMP is allowed fewer threads than the computation waits for.

What: `OMP_THREAD_LIMIT` (or a limit of the library) allows fewer threads than torch expects for its work. Code with a
barrier then waits for threads that are never started. The process looks busy: the waiting thread uses a whole core.

Why: a scheduler or a container image sets `OMP_THREAD_LIMIT`, while `OMP_NUM_THREADS` or `torch.set_num_threads`
requests more. Most often the hang appears in convolutions in `loss.backward()`.

Cure: unset `OMP_THREAD_LIMIT`, or request no more threads than it allows.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import at, busy, stall_rule, stands
from torchmedic.records.stall import Stall


@stall_rule("TM505", "openmp-team-too-small")
def check(stall: Stall) -> Draft | None:
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        limit = process.environment.get("OMP_THREAD_LIMIT", "")
        if view is None or not limit.isdecimal() or not stands(view) or not busy(process):
            continue
        threads, thread = view.torch_threads or 1, view.main
        if thread is None or threads <= int(limit):
            continue
        draft = check.draft(stall, "likely")
        draft.message = f"torch divides its work for {threads} threads, but OpenMP may have only {limit}"
        draft.cause = f"OMP_THREAD_LIMIT={limit}: a barrier waits for threads that are never started, and spins"
        draft.at(at(thread.user_frame, "cause", "this never comes back"))
        draft.because(f"at one and the same instruction in all looks, while using {process.busy:.0%} of a core")
        draft.because(f"OMP_THREAD_LIMIT={limit}, torch.get_num_threads() is {threads}")
        return draft.help(f"unset OMP_THREAD_LIMIT, or `torch.set_num_threads({limit})`")
    return None
