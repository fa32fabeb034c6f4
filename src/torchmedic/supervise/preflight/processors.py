"""Checks of CPUs: the threads and workers of the run, and how many of them can run at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn

_MAX_THROTTLED_SHARE = 0.05  # share of the periods so far; the start of a container causes less


def check(situation: Situation) -> Iterator[Finding]:
    yield _team(situation)
    yield _cpus(situation)
    yield _throttling(situation)
    if situation.script is not None:
        yield _workers(situation)


def thread_limit(situation: Situation) -> int | None:
    text = situation.environ.get("OMP_THREAD_LIMIT", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _team(situation: Situation) -> Finding:
    """Check OMP_THREAD_LIMIT: oneDNN spins until as many threads run as torch has announced."""
    limit, threads = thread_limit(situation), situation.threads
    if limit is None:
        return ok("OpenMP threads", "OMP_THREAD_LIMIT is not set")
    if threads is None or limit >= threads:
        return ok("OpenMP threads", f"OMP_THREAD_LIMIT={limit} is enough" + (f" for {threads}" if threads else ""))
    reason = f"OMP_THREAD_LIMIT={limit}, and torch counts on {threads} threads"
    advice = f"unset OMP_THREAD_LIMIT, or set OMP_NUM_THREADS={limit}"
    if situation.torch is not None and situation.torch.backward_ends is False:
        return fail(
            "OpenMP threads", f"{reason}: the backward pass of one convolution was tried and did not end", advice
        )
    return warn("OpenMP threads", f"{reason}: a kernel that waits for all of them never ends", advice)


def _cpus(situation: Situation) -> Finding:
    threads, share = situation.threads, situation.share
    quota = situation.pressure.cpu_quota
    have = f"{situation.cores} CPUs" if situation.cores != 1 else "1 CPU"
    if quota is not None and quota < situation.cores:
        have += f", a quota of {quota:g}"
    if threads is None:
        return ok("CPU", have)
    if threads > math.ceil(share):
        return warn(
            "CPU",
            f"torch will use {threads} threads and there are {have}: they wait for each other",
            f"set OMP_NUM_THREADS={max(1, int(share))}, or call torch.set_num_threads({max(1, int(share))})",
        )
    return ok("CPU", f"{have}, {threads} thread{'s' if threads != 1 else ''} of torch")


def _throttling(situation: Situation) -> Finding:
    pressure = situation.pressure
    if pressure.cpu_quota is None or not pressure.periods or pressure.throttled_periods is None:
        return ok("CPU throttling", "no CPU quota" if pressure.cpu_quota is None else "none so far")
    share = pressure.throttled_periods / pressure.periods
    reason = f"{share:.0%} of {pressure.periods} periods so far were cut short by the quota of {pressure.cpu_quota:g}"
    if share > _MAX_THROTTLED_SHARE:
        return warn("CPU throttling", reason, "raise the quota, or use fewer threads and workers")
    return ok("CPU throttling", reason)


def _workers(situation: Situation) -> Finding:
    assert situation.script is not None
    seen = [loader for loader in situation.script.loaders if loader.workers is not None]
    if not situation.script.loaders:
        return ok("DataLoader workers", "no DataLoader in the script")
    if not seen:
        return ok("DataLoader workers", "num_workers cannot be seen in the script")
    most = max(seen, key=lambda loader: loader.workers or 0)
    workers = most.workers or 0
    if workers > math.ceil(situation.share):
        quota = "" if situation.pressure.cpu_quota is None else f" with a quota of {situation.pressure.cpu_quota:g}"
        return warn(
            "DataLoader workers",
            f"{most.place} starts {workers} workers on {situation.cores} CPUs{quota}",
            f"num_workers={max(1, int(situation.share))} or fewer",
        )
    return ok(
        "DataLoader workers", f"at most {workers}, {most.place}" if workers else "none, data is loaded in the script"
    )
