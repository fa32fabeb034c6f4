"""Checks of memory: shared memory for the batches of workers, free memory, swapping."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from torchmedic.diagnose.words.format import size
from torchmedic.supervise.host import cgroups
from torchmedic.supervise.preflight.facts import batch_bytes
from torchmedic.supervise.preflight.finding import Finding, Situation, fail, ok, warn

_DOCKER_SHM_BYTES = 64 << 20  # the default of a container
_LOW_BYTES = 1 << 30  # torch alone takes about a third of it, with CUDA two or three times as much
_MAX_STALL_PERCENT = 10.0  # percent of ten seconds in which nothing could run because memory was short
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def check(situation: Situation, overcommit: Path = _OVERCOMMIT) -> Iterator[Finding]:
    yield _shared(situation)
    yield _free(situation)
    yield _pressure(situation)
    if situation.workers and cgroups.number(overcommit) == 2:
        yield warn(
            "overcommit",
            "vm.overcommit_memory is 2: every forked worker needs as much memory again as the script has asked for",
            "sysctl vm.overcommit_memory=0, or start workers by spawn",
        )


def _larger(needed: int = 0) -> str:
    gigabytes = max(8, math.ceil(needed / (1 << 30)) + 1)
    return (
        f"--shm-size={gigabytes}g or --ipc=host for a container, "
        f"`mount -o remount,size={gigabytes}G /dev/shm` for a host"
    )


def _shared(situation: Situation) -> Finding:
    total, free = situation.pressure.shm_size, situation.pressure.shm_free
    if total is None or free is None:
        if situation.workers:
            return warn("shared memory", "/dev/shm cannot be read; workers pass their batches through it")
        return ok("shared memory", "there is no /dev/shm, and no workers were seen that need it")
    room = f"{size(free)} of {size(total)} free in /dev/shm"
    loaders = [loader for loader in situation.script.loaders if loader.workers] if situation.script else []
    for loader in loaders:
        batch = batch_bytes(loader, situation.script.constants) if situation.script else None
        if batch is None:
            continue
        needed = batch * loader.prefetch * (loader.workers or 0)
        sum_of = f"{loader.workers} workers x {loader.prefetch} batches of {size(batch)} ({loader.place})"
        if batch > total:
            return fail(
                "shared memory", f"{room}: a single batch of {loader.place} takes {size(batch)}", _larger(needed)
            )
        if needed > free:
            return warn(
                "shared memory", f"{room}, and {sum_of} can take {size(needed)}", f"fewer workers, or {_larger(needed)}"
            )
        return ok("shared memory", f"{room}; {sum_of} take at most {size(needed)}")
    if total <= _DOCKER_SHM_BYTES:
        return warn("shared memory", f"{room}, which is too little for workers with batches of images", _larger())
    if loaders:
        most = max(loaders, key=lambda loader: (loader.workers or 0) * loader.prefetch)
        each = free // ((most.workers or 1) * max(most.prefetch, 1))
        reason = f"{room}: {most.workers} workers ({most.place}) may have batches of up to {size(each)}"
        return (
            warn("shared memory", reason, _larger()) if each < _DOCKER_SHM_BYTES // 16 else ok("shared memory", reason)
        )
    return ok("shared memory", room)


def _free(situation: Situation) -> Finding:
    pressure = situation.pressure
    available, what = pressure.memory_available, "the host"
    bounds = [bound for bound in (pressure.memory_limit, pressure.memory_high) if bound is not None]
    if bounds and pressure.memory_current is not None:
        left = min(bounds) - pressure.memory_current
        if available is None or left < available:
            available, what = max(left, 0), f"the control group, whose limit is {size(min(bounds))}"
    if available is None:
        return ok("memory", "the host does not say how much is free")
    swap = (
        f", {size(pressure.swap_free)} of swap"
        if pressure.swap_free
        else ", no swap"
        if pressure.swap_total == 0
        else ""
    )
    if available < _LOW_BYTES:
        return warn("memory", f"{size(available)} free in {what}{swap}", "end what is not needed, or raise the limit")
    return ok("memory", f"{size(available)} free in {what}{swap}")


def _pressure(situation: Situation) -> Finding:
    stuck = max(
        (psi.full or 0.0 for psi in (situation.pressure.memory, situation.pressure.group_memory) if psi), default=None
    )
    if stuck is None:
        return ok("memory pressure", "the kernel keeps no record (PSI)")
    if not stuck:
        return ok("memory pressure", "nothing has waited for memory in the last 10 s")
    reason = f"all tasks waited for memory for {stuck:g} % of the last 10 s"
    if stuck > _MAX_STALL_PERCENT:
        return warn("memory pressure", reason, "something is swapping: find it with `ps aux --sort -rss | head`")
    return ok("memory pressure", reason)
