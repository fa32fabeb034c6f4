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

from torchmedic.diagnose.last_words import draft_of, size, step_of, who
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Death, Diagnosis, Moment

CODE, NAME = "TM806", "killed-for-memory"

_NEAR = 0.9
_OOM_LINE = "killed process"
_GROWTH = 1.2


def check(death: Death) -> Diagnosis | None:
    if death.signal != "SIGKILL":
        return None
    lines = [line for line in death.kernel_lines if _OOM_LINE in line.lower()]
    limit = min((each for each in (death.memory_limit, death.host_memory) if each), default=None)
    used = max(death.peak_rss or 0, max((moment.rss for moment in _moments(death)), default=0))
    near = limit is not None and used > _NEAR * limit
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
    _growth(draft, death)
    return draft.done(step=step_of(death), rank=death.rank)


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
