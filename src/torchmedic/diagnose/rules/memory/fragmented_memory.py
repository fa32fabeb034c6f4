"""The device had enough free memory, but not in one piece.

What: the allocator holds more unused memory than was requested. None of its pieces is large enough, and the allocator
cannot return them to the driver because other parts of the same segments are in use.

Why: tensors of many different sizes are allocated and freed (batches of varying length, growing buffers), and each
large segment is split into parts that are freed at different times.

Cure: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which lets segments grow instead of being split. Batches
of a few fixed sizes also help.
"""

from __future__ import annotations

import os

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence

_MIN_UNUSED_SHARE = 0.2  # share of what the allocator has reserved


@rule("TM407", "fragmented-memory")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None or not autopsy.exhaustion.on_device or autopsy.asked is None:
        return None
    measured = autopsy.measured
    if measured.cache < autopsy.asked or measured.cache < _MIN_UNUSED_SHARE * measured.reserved:
        return None  # a little lies in pieces in every full memory
    if "expandable_segments:true" in _setting().lower():
        return None
    draft = check.draft(evidence, "proven" if measured.exact else "likely")
    draft.message = f"no free block has {size(autopsy.asked)}, although {size(measured.cache)} are reserved and free"
    draft.cause = (
        f"the free memory lies in pieces between tensors that are in use; {size(measured.inactive_split)} of it "
        f"in split blocks"
    )
    draft.at(*evidence.at_user_line("cause", f"{size(autopsy.asked)} asked for here"))
    shown(draft, autopsy)
    return draft.help("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment", safety="safe")


def _setting() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
