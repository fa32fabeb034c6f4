"""`torch.cuda.empty_cache()` is called in every step, and takes a good part of it.

What: the call gives all cached memory back to the driver, and the next step has to ask for it again. Both are slow, and
the driver waits for the device each time. It frees nothing that is in use, so that it cures no lack of memory.

Why: it was added against running out of memory, where it hardly ever helps.

Cure: leave it out. Where fragmentation is the trouble, set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Diagnosis

CODE, NAME = "TM617", "empty-cache-every-step"


def check(evidence: LoopEvidence) -> Diagnosis | None:
    if evidence.kind != "empty cache":
        return None
    incident, facts = evidence.incident, evidence.facts
    share = f"{facts['share']:.0%}"
    draft = RULE.draft(
        evidence,
        "proven",
        f"empty_cache() in every step takes {share} of the time",
        f"each call takes {facts['each'] * 1e3:.2g} ms, and the memory that it gives back is asked for again",
    )
    draft.at(evidence.at("cause", incident.cause, f"{share} of the time of a step is spent here", "empty_cache"))
    draft.because(
        f"measured over {facts['calls']} steps, from when the device was idle; to ask for the memory again "
        "costs more on top",
    )
    draft.help("leave it out: memory that is in use is not freed by it", safety="safe")
    return draft.done(severity="warning")


RULE = Rule(CODE, NAME, check)
