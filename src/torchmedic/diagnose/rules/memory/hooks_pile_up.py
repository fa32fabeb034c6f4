"""Hooks are registered again and again on the same module or tensor, and none is removed.

What: the number of hooks of one module, tensor or optimizer grows with every step (or epoch, validation, trial). Each
forward or backward calls all of them, so steps become slower, and everything that the hooks refer to stays in memory:
lists that they have filled, outputs with their graphs, the variables of enclosing functions.

Why: `register_forward_hook`, `register_hook` and similar functions add a hook; they do not replace the previous one.
Such a call in the training loop, in `forward`, or in a function that runs for every batch adds one hook each time.

Cure: register the hook once, before the loop. If the hook is needed only for a short time, keep the handle that
`register_...` returns, and call `handle.remove()` afterwards.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import end, measured, period, span
from torchmedic.evidence.leaks.evidence import LeakEvidence


@rule("TM454", "hooks-pile-up")
def check(evidence: LeakEvidence) -> Draft | None:
    growth = evidence.growth
    if growth.what != "hooks":
        return None
    name = growth.held.name
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` has {growth.held.size} hooks by now, and every {period(evidence)} adds more"
    draft.cause = (
        f"`{name}.{growth.held.last}` grew with every {period(evidence)} {span(evidence)}, and none was removed"
    )
    draft.at(evidence.at_put("cause", "adds another hook, and does not remove the earlier ones"))
    draft.because("all of them are called each time, so that steps get slower too", measured(evidence), end(evidence))
    draft.help("register it once, before the loop")
    draft.help("or keep the handle that is returned, and call `.remove()` on it at the end of the step")
    return draft.rated("warning")
