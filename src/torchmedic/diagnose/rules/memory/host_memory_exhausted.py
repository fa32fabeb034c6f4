"""The host has too little memory for the allocation at this line.

What: an allocation in host memory (not on a GPU) was refused, because it is larger than the memory of the host.

Why: two tensors whose shapes do not match were broadcast to a much larger tensor ([N, 1] with [N] gives [N, N]), a size
was computed wrongly, or memory was already filled step by step: tensors collected in a list, with their graphs.

Cure: make the shapes equal before the operation, process the data in parts, or keep numbers (`loss.item()`) instead of
tensors.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.memory import add_cures
from torchmedic.diagnose.rule import Draft, RuleAnswer, rule
from torchmedic.diagnose.rules.memory._host_refusal import refusal_of_host
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.memory.host import HostMemory
from torchmedic.observe.memory.limits import mappings


@rule("TM401", "host-memory-exhausted")
def check(evidence: RaisedEvidence) -> Draft | RuleAnswer | None:
    refusal = refusal_of_host(evidence)
    if refusal is None or refusal.bound is not None:
        return None  # a limit of the process has its own rule
    asked, memory = refusal.asked, refusal.memory
    message = refusal.what or "the host's memory is exhausted"
    room = asked is not None and memory.available is not None and asked < memory.available
    explained = not room or refusal.overflow is not None or memory.committed is not None
    draft = check.draft(evidence, "proven" if explained else "possible", message, _cause(asked, memory))
    refusal.place(draft)
    if not explained:
        draft.because(mappings() or "no limit was found that explains the failure")
    if memory.committed is not None and memory.commit_limit is not None:
        draft.because(
            f"the kernel promises no more than it has (vm.overcommit_memory=2): {size(memory.committed)} of "
            f"{size(memory.commit_limit)} are promised"
        )
    graphs = refusal.hold(draft)
    if refusal.grown is not None:
        draft.help("compute it in blocks, or bring both to the same shape first if all pairs were not meant")
    elif refusal.overflow is not None or (asked is not None and memory.total is not None and asked > memory.total):
        draft.help("check the sizes on this line: no host of this size can hold the result")
    elif graphs:
        draft.help(graphs)
    else:
        cures = add_cures(draft, evidence.autopsy)
        if not cures.is_help:
            draft.help("work in smaller parts, or keep less from earlier steps")
        return RuleAnswer(draft.done(), cures.plan)
    return draft


def _cause(asked: int | None, memory: HostMemory) -> str:
    want = f"{size(asked)} asked for" if asked is not None else "an allocation was refused"
    if memory.total is None:
        return want
    free = f", of which {size(memory.available)} are free" if memory.available is not None else ""
    return f"{want}; the host has {size(memory.total)}{free}"
