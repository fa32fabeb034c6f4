"""A forked process waits for OpenMP threads that the fork did not copy.

What: torch (or NumPy) has computed with several threads, then the process was forked. The child assumes that these
threads exist, gives them work and waits for the result.

Why: `multiprocessing` with the start method `fork`, after the parent has computed anything large enough for several
threads. DataLoader workers are safe, because torch gives them one thread; processes that are forked by other means are
not.

Cure: use `torch.multiprocessing.set_start_method("spawn")`, or call `torch.set_num_threads(1)` first in the child, or
fork before anything is computed.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import at, idle, main_line, stall_rule, stands, who
from torchmedic.records.stall import Stall


@stall_rule("TM504", "openmp-after-fork")
def check(stall: Stall) -> Draft | None:
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        if view is None or not view.forked or not stands(view) or not idle(process):
            continue
        threads, before = view.torch_threads or 1, view.threads_at_fork or 1
        thread, row = view.main, process.main
        if thread is None or row is None or thread.waits_for is not None or row.syscall != "futex":
            continue
        # Fewer than the team needs, and as many as the parent had: they were not copied.
        if threads < 2 or before < threads or len(process.own_threads) >= threads or _in_python(thread.frames[0].file):
            continue
        named = [name for name in row.native if "gomp" in name or "kmp" in name]
        draft = check.draft(stall, "proven" if named else "likely")
        draft.message = f"{who(process)} waits for OpenMP threads that were lost in a fork"
        draft.cause = (
            f"it was forked from a process with {before} threads and waits for a team of {threads} that does not exist"
        )
        draft.at(at(thread.user_frame, "cause", "this computes with several threads, in a forked process"))
        draft.at(main_line(stall))
        draft.because(f"process {process.pid} has {len(process.own_threads)} of the {threads} threads torch counts on")
        draft.because("its main thread waits in the kernel (futex) inside of native code")
        draft.because(f"it is in `{named[0]}`" if named else "")
        return draft.help("`torch.set_num_threads(1)` as the first thing in the child, or the start method `spawn`")
    return None


def _in_python(file: str) -> bool:
    """Whether the innermost frame is of the standard library, which waits by itself."""
    return file.endswith(("threading.py", "queue.py", "connection.py", "selectors.py", "subprocess.py"))
