"""The allocator freed its cache and retried again and again, until an allocation failed.

What: before this allocation was refused, the allocator had emptied its cache and retried many times. Each retry waits
for the device, so the run had become slow as well.

Why: the step needs about as much memory as the device has. A step that fits only after the cache has been emptied does
not really fit.

Cure: use a slightly smaller batch; set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` if sizes vary.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import most_held, noticed, shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence

_MIN_RETRIES = 8


@rule("TM413", "allocator-thrash")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None or not autopsy.exhaustion.on_device or autopsy.agent is None:
        return None
    retries, updates = autopsy.measured.retries, autopsy.agent.clock.updates
    if retries < _MIN_RETRIES or updates < 2 or retries < updates // 4:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"the allocator emptied its cache {retries} times in {updates} steps before it gave up"
    draft.cause = f"memory had been short for some time: {size(autopsy.asked or 0)} were refused in the end"
    draft.at(most_held(autopsy), *noticed(autopsy))
    shown(draft, autopsy)
    draft.help("make the batch a little smaller")
    return draft.help("where sizes vary, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", safety="safe")
