"""The kernel killed the process because memory ran out.

What: the machine, or the memory limit of the container or job, was exhausted, and the kernel ended this process
(SIGKILL by the OOM killer). Such an end cannot be caught, so the script could say nothing. The line is where training
was last seen.

Why: memory of the host, not of the GPU. Tensors that are kept over steps (a loss added up without `.item()`, outputs
collected in a list), a dataset that is copied by every DataLoader worker, batches that wait in a prefetch queue.

Cure: keep numbers instead of tensors that hold a graph, use fewer workers or a smaller `prefetch_factor`, map the data
instead of loading it, or give the job more memory.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchmedic.diagnose.last_words import draft_of, line_location, size, step_of, who
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.memory_records import comparable
from torchmedic.records import Death, Diagnosis, Location, MemorySample, Moment

CODE, NAME = "TM806", "killed-for-memory"

_NEAR = 0.9
_OOM_LINE = "killed process"
_GROWTH = 1.2
_WINDOW = 10.0  # seconds


def check(death: Death) -> Diagnosis | None:
    if death.signal != "SIGKILL":
        return None
    lines = [line for line in death.kernel_lines if _OOM_LINE in line.lower()]
    limit = min((each for each in (death.memory_limit, death.host_memory) if each), default=None)
    used = max(death.peak_rss or 0, max((moment.rss for moment in _moments(death)), default=0))
    near = limit is not None and (used > _NEAR * limit or any(each.share > _NEAR for each in _samples(death)[-3:]))
    if lines:
        proof, fact = "the kernel's log names the process", f"kernel: {lines[-1]}"
    elif death.oom_kills:
        proof = "the kernel counted a kill for memory in the run's cgroup at that moment"
        fact = f"memory.events: oom_kill rose by {death.oom_kills} in the last seconds"
    elif near:
        proof, fact = "its memory was close to the limit when it was killed; the kernel's own word is missing", ""
    elif death.host_oom_kills:
        proof = "the kernel killed for memory on this host at that moment; whom, it does not say"
        fact = f"/proc/vmstat: oom_kill rose by {death.host_oom_kills} in the last seconds"
    else:
        return None
    draft = draft_of(
        death,
        CODE,
        NAME,
        "proven" if lines or death.oom_kills else "likely",
        f"{who(death)} was killed because memory ran out",
        f"SIGKILL, and {proof}",
    )
    draft.because(fact)
    if limit is not None:
        kind = "the memory limit of its cgroup" if limit == death.memory_limit else "the memory of this host"
        draft.because(f"{kind} is {size(limit)}; the largest process of the run held {size(used)}")
    if death.swap_free == 0:
        draft.because("there is no free swap")
    _last_seconds(draft, death)
    holder = _holder(draft, death, used)
    _growth(draft, death)
    return _blaming(holder, draft.done(step=step_of(death), rank=death.rank))


def _last_seconds(draft: Draft, death: Death) -> None:
    """How memory went as the parent saw it: also where many processes have filled it together."""
    samples = _samples(death)
    if len(samples) < 2:
        return
    first, last = samples[0], samples[-1]
    seconds = last.time - first.time
    rise = (last.used or 0) - (first.used or 0)
    if seconds >= 1 and rise > 0.02 * (last.limit or 1):
        draft.because(
            f"when it was last measured, {size(last.used or 0)} of {size(last.limit or 0)} were in use, "
            f"{size(rise)} more than {seconds:.0f} s before"
        )
    if last.waiting is not None and last.waiting >= 10:
        draft.because(f"all processes of the host waited for memory {last.waiting:.0f} % of the last ten seconds")
    others = sum(last.private.values()) - last.private.get(death.pid, 0)
    if len(last.private) > 1 and others > 0.2 * (last.limit or 1):
        draft.because(f"{len(last.private) - 1} other processes of the run held {size(others)} for themselves")


def _samples(death: Death) -> list[MemorySample]:
    """Of the time when the process was still there."""
    return comparable([each for each in death.samples if each.private.get(death.pid)], _WINDOW)


def _holder(draft: Draft, death: Death, used: int) -> Location | None:
    """The line that fills what held most of it, as the process itself knew shortly before."""
    held = next(iter(death.holders), None)
    if held is None or held.nbytes < used // 4:
        return None
    items = f" in {held.items} items" if held.items else ""
    draft.because(f"shortly before, `{held.name}` held {size(held.nbytes)}{items}")
    return line_location("cause", held.file, held.line, f"`{held.name}` is filled here") if held.file else None


def _blaming(holder: Location | None, diagnosis: Diagnosis) -> Diagnosis:
    """The line to change is the one that fills what held most; the line that came last is only where it ended."""
    if holder is None:
        return diagnosis
    others = tuple(
        replace(each, role="surfaced") if each.role == "cause" else each
        for each in diagnosis.locations
        if (each.file, each.line) != (holder.file, holder.line)
    )
    return replace(diagnosis, locations=(holder, *others))


def _growth(draft: Draft, death: Death) -> None:
    """Memory that grew from step to step is kept by the script; memory that was there at once is simply needed."""
    moments = [moment for moment in _moments(death) if moment.rss]
    first, last = (moments[0], moments[-1]) if moments else (None, None)
    if first is not None and last is not None and last.step - first.step >= 2 and last.rss > _GROWTH * first.rss:
        rate = (last.rss - first.rss) // (last.step - first.step)
        draft.because(f"resident memory grew by {size(rate)} a step, from step {first.step} to step {last.step}")
        draft.help(
            "look for tensors that are kept over steps: keep `loss.item()` or `x.detach()`, not the tensor itself"
        )
    elif death.part == "worker":
        draft.help("use fewer DataLoader workers or a smaller `prefetch_factor`")
    else:
        draft.help("use a smaller batch, fewer workers, mapped instead of loaded data, or a job with more memory")


def _moments(death: Death) -> tuple[Moment, ...]:
    return death.box.moments if death.box is not None else ()


RULE = Rule(CODE, NAME, check)
