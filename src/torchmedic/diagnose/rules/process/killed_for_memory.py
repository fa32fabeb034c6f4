"""The kernel killed the process because host memory ran out.

What: the memory of the machine was exhausted, and the kernel ended this process (SIGKILL by the OOM killer). SIGKILL
cannot be caught, so the script printed no message. The line shown is the one that fills the largest holder, otherwise
the last known line of the training. If the limit of a container or job was reached, the code is TM417.

Why: host memory, not GPU memory. Tensors that are kept over steps (a loss added up without `.item()`, outputs collected
in a list), a dataset that every DataLoader worker copies, batches that wait in a prefetch queue; or other programs on
this machine.

Cure: keep numbers instead of tensors that hold a graph, use fewer workers or a smaller `prefetch_factor`, memory-map
the data instead of loading it, or use a machine with more memory.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import rule
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.kills import NEAR_LIMIT, LastMemory
from torchmedic.records import Diagnosis
from torchmedic.records.death import Death


@rule("TM806", "killed-for-memory")
def check(death: Death) -> Diagnosis | None:
    if death.signal != "SIGKILL":
        return None
    memory = LastMemory(death)
    lines = memory.kernel_lines
    if lines:
        proof = "the kernel's log names the process", f"kernel: {lines[-1]}"
    elif memory.counted is not None:
        proof = memory.counted
    elif memory.near_host_limit:
        proof = NEAR_LIMIT, ""
    elif death.host_oom_kills:
        words = "the kernel killed a process for memory on this host at that moment, but does not say which"
        proof = words, f"/proc/vmstat: oom_kill rose by {death.host_oom_kills} in the last seconds"
    else:
        return None
    draft = memory.draft(check, "memory ran out", proof, lines)
    if death.host_memory is not None:
        draft.because(
            f"the memory of this host is {size(death.host_memory)}; the largest process of the run held "
            f"{size(memory.used)}"
        )
    memory.tell(draft)
    holder = memory.holder(draft)
    memory.advise(draft, "another machine, or fewer programs on this one")
    return memory.blaming(holder, draft.done())
