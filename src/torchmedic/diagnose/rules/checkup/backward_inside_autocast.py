"""`backward()` is called while autocast is on.

What: backward runs every operation in the precision of its forward operation, so autocast has no effect there, and
torch advises against it. In most models it does no harm.

Why: the `with torch.autocast(...)` block includes the backward call.

Cure: end the block after the loss.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp


@rule("TM640", "backward-inside-autocast")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        if graph.autocast:
            draft = check.draft(evidence, "proven")
            draft.message = "backward() is called while autocast is on"
            draft.cause = f"autocast of `{graph.autocast}` was on when backward was called"
            draft.at(evidence.backward_call(graph, "cause", "autocast is on here, which torch advises against"))
            draft.help("end the `with torch.autocast(...)` block before backward")
            return draft.about(step=graph.step).rated("note")
    return None
