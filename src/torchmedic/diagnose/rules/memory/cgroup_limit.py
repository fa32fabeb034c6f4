"""The memory limit of the container or job was reached, and the kernel killed the process.

What: the processes of this cgroup (a container, a pod, a Slurm job, a systemd slice) together reached its memory limit,
and the kernel killed one of them (SIGKILL). The host itself may have enough memory. SIGKILL cannot be caught, so the
script printed no message. The line shown is the one that fills the largest holder, otherwise the last known line of the
training.

Why: host memory, not GPU memory. Tensors that are kept over steps, a dataset that every DataLoader worker copies,
batches that wait in a prefetch queue or in /dev/shm, which counts too; or a limit that is too low.

Cure: request more memory (`docker run --memory`, `resources.limits.memory`, `sbatch --mem`), or use less: keep numbers
instead of tensors, use fewer workers or a smaller `prefetch_factor`, memory-map the data instead of loading it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmedic.diagnose.rule import Answer, Draft, rule
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.kills import NEAR_LIMIT, LastMemory
from torchmedic.records import Diagnosis
from torchmedic.records.death import Death

if TYPE_CHECKING:
    from torchmedic.evidence.exception import RaisedEvidence


@rule("TM417", "cgroup-limit")
def check(evidence: RaisedEvidence | Death) -> Answer:
    return _killed(evidence) if isinstance(evidence, Death) else _refused(evidence)


def _refused(evidence: RaisedEvidence) -> Draft | None:
    """The kernel hardly ever refuses for this limit, some sandboxes do: told where nothing nearer explains it."""
    from torchmedic.diagnose.rules.memory._host_refusal import refusal_of_host

    refusal = refusal_of_host(evidence)
    if refusal is None or refusal.bound is not None or refusal.asked is None or refusal.overflow is not None:
        return None
    asked, memory = refusal.asked, refusal.memory
    if memory.cgroup_limit is None or memory.available is None or memory.committed is not None:
        return None
    fits_group = (memory.resident or 0) + asked <= memory.cgroup_limit
    if fits_group or asked > memory.available:
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"{refusal.what}: its cgroup may hold {size(memory.cgroup_limit)}"
    draft.cause = (
        f"{size(asked)} asked for, {size(memory.resident or 0)} held; the host has {size(memory.available)} free"
    )
    refusal.place(draft)
    refusal.hold(draft)
    return draft.help(
        "give the container or job more memory: `docker run --memory`, `sbatch --mem`; or work in smaller parts"
    )


def _killed(death: Death) -> Diagnosis | None:
    if death.signal != "SIGKILL" or death.memory_limit is None:
        return None
    memory = LastMemory(death)
    group = f"the memory limit of its cgroup is {size(death.memory_limit)}"
    lines = [line for line in memory.kernel_lines if "memory cgroup" in line.lower()]
    if lines:
        proof = "the kernel's log says that it was for this limit", f"kernel: {lines[-1]}"
    elif memory.counted is not None and memory.reached_group_limit:
        words, fact = memory.counted
        proof = words, fact + memory.hits
    elif memory.counted is None and not memory.kernel_lines and memory.near_group_limit:
        none = "the kernel counted no kill in it: a scheduler or systemd-oomd, who watch it too, may have sent it"
        proof = NEAR_LIMIT, none if death.oom_kills == 0 else ""
    else:
        return None
    why = f"its cgroup had used up its {size(death.memory_limit)} of memory"
    draft = memory.draft(check, why, proof, lines)
    peak = f", and the most that it held {size(death.memory_peak)}" if death.memory_peak else ""
    draft.because(f"{group}{peak}; the largest process of the run held {size(memory.used)}")
    if death.memory_high is not None:
        draft.because(f"memory.high is {size(death.memory_high)}: above it the kernel slows its processes down")
    memory.tell(draft)
    holder = memory.holder(draft)
    memory.advise(draft, "`docker run --memory`, `resources.limits.memory`, `sbatch --mem`")
    return memory.blaming(holder, draft.done())
