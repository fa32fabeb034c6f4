"""`torch.cuda.empty_cache()` is called in every step, and takes a considerable part of it.

What: the call returns all cached memory to the driver, and the next step has to request it again. Both are slow, and
the driver waits for the device each time. The call does not free memory that is in use, so it does not cure a lack of
memory.

Why: the call was added to avoid out-of-memory errors, but it rarely helps.

Cure: remove the call. If fragmentation is the problem, set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import EmptyCacheEveryStep
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM617", "empty-cache-every-step", EmptyCacheEveryStep)
def check(evidence: LoopEvidence, incident: EmptyCacheEveryStep) -> Draft | None:
    share = f"{incident.share:.0%}"
    draft = check.draft(evidence, "proven")
    draft.message = f"empty_cache() in every step takes {share} of the time"
    draft.cause = f"each call takes {incident.each * 1e3:.2g} ms, and the memory that it gives back is asked for again"
    draft.at(evidence.at("cause", incident.cause, f"{share} of the time of a step is spent here", "empty_cache"))
    draft.because(
        f"measured over {incident.calls} steps, from when the device was idle; to ask for the memory again "
        "costs more on top"
    )
    draft.help("remove the call: it does not free memory that is in use", safety="safe")
    return draft.rated("warning")
