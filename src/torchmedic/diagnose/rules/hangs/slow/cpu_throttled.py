"""The run gets much less CPU time than its threads need.

What: the run continues at a fraction of its speed. Either its control group has used up its CPU quota in most periods
and is stopped until the next period begins, or many more of its threads want to run than there are cores.

Why: a container with a CPU limit looks like a machine with all the cores of its host. torch and its workers then start
a thread per core, which use up the quota in a fraction of each period. Without a limit: `num_workers` times the threads
of each worker, or several jobs on one machine.

Cure: use as many threads as there are available CPUs: `torch.set_num_threads`, `OMP_NUM_THREADS`, fewer workers; or
raise the limit.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.stall import BUSY, main_line, stall_rule
from torchmedic.records.stall import Stall

_MIN_SHARE_OF_PERIODS = 0.5  # of the periods
_MIN_THREADS_PER_CORE = 3.0  # threads that want to run, per core
_MIN_THREADS = 8  # such threads
_MIN_SHARE_WAITING = 0.5  # of the time, by PSI


@stall_rule("TM553", "cpu-throttled")
def check(stall: Stall) -> Draft | None:
    host, rates = stall.host, stall.pressure
    wanted = sum(process.demand for process in stall.processes)
    if host is None or rates is None or wanted < BUSY:
        return None  # who wants no CPU is not slowed down for want of it
    runnable = _runnable(stall)
    if (
        host.cpu_quota is not None
        and (rates.throttled_periods or 0.0) > _MIN_SHARE_OF_PERIODS
        and runnable > host.cpu_quota
    ):
        return _throttled(stall, host.cpu_quota, rates.throttled_periods or 0.0, runnable)
    waiting = max(rates.cpu_some or 0.0, rates.group_cpu_some or 0.0)
    cores = host.cpus or 0
    if cores and runnable >= max(_MIN_THREADS, _MIN_THREADS_PER_CORE * cores) and waiting > _MIN_SHARE_WAITING:
        return _crowded(stall, cores, waiting, runnable)
    return None


def _runnable(stall: Stall) -> int:
    """Threads of the run that wanted a core for most of the time between the looks."""
    return sum((thread.demand or 0.0) > BUSY for process in stall.processes for thread in process.own_threads)


def _throttled(stall: Stall, quota: float, share: float, runnable: int) -> Draft:
    times = runnable / quota
    draft = check.draft(stall, "likely")
    draft.message = f"slowed down: {runnable} threads want to run, and the CPU limit allows {quota:g}"
    draft.cause = f"the control group was stopped in {share:.0%} of its periods, as its CPU time was used up"
    draft.at(main_line(stall, "cause", "the main thread is slow here"))
    draft.because(f"expect about {times:.1f} times as long as with a core for every thread")
    draft.because(*_threads(stall))
    threads = max(1, math.floor(quota))
    draft.help(f"`torch.set_num_threads({threads})` or OMP_NUM_THREADS={threads}, and fewer workers")
    draft.help("raise the CPU limit of the container or the job")
    return draft.rated("warning")


def _crowded(stall: Stall, cores: int, waiting: float, runnable: int) -> Draft:
    draft = check.draft(stall, "likely")
    draft.message = f"slowed down: {runnable} threads of the run share {cores} cores"
    draft.cause = "every thread gets a fraction of a core"
    draft.at(main_line(stall, "cause", "the main thread is slow here"))
    draft.because(
        f"threads waited for a core in {waiting:.0%} of the time; expect {runnable / cores:.1f} times as long"
    )
    draft.because(*_threads(stall))
    draft.help(f"have no more than {cores} threads in all: `torch.set_num_threads`, OMP_NUM_THREADS, `num_workers`")
    return draft.rated("warning")


def _threads(stall: Stall) -> list[str]:
    inner = stall.inner
    workers = sum(process.is_loader_worker for process in stall.processes)
    facts = [f"torch.get_num_threads() is {inner.torch_threads}"] if inner is not None and inner.torch_threads else []
    return facts + ([f"{workers} DataLoader workers"] if workers else [])
