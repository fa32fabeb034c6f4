"""A line waits for the device in every step, and the device is then idle for a considerable part of the step.

What: `torch.cuda.synchronize()`, `.item()`, `float(t)`, `if t:`, `print(t)` or `.cpu()` stop the host until the device
has finished all its work. The device is then idle until the host has prepared more.

Why: the host prepares kernels while the device still works on earlier ones. A wait removes this lead. Its cost is not
the time of the call but the time for which the device is idle after it, which is the time that was measured. Kernels of
one stream always run in order: no wait is needed for correct results.

Cure: remove `synchronize()`; read numbers only every few hundred steps, or keep `loss.detach()` and read it one step
later; compute on the device instead of the CPU. For batches: `pin_memory=True` and `.to(device, non_blocking=True)`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import NeedlessWait
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Diagnosis

_WORDS = {
    "__float__": "float",
    "__int__": "int",
    "__bool__": "a condition on the value of a tensor",
    "__index__": "int",
    "__repr__": "print",
    "__format__": "print",
    "__setitem__": "a selection whose size depends on values",
    "__contains__": "a condition on the value of a tensor",
}


@loop_rule("TM619", "needless-wait", NeedlessWait)
def check(evidence: LoopEvidence, incident: NeedlessWait) -> Diagnosis | None:
    waited, name = incident.waited, incident.waited.name
    said = _WORDS.get(name, f"{name}()")
    share = f"{waited.share:.0%}"
    draft = check.draft(evidence, "proven")
    draft.message = f"the device is idle for {share} of every step, because this line waits for it"
    draft.cause = f"after {said} has waited for the device, nothing is prepared for it"
    method = name if not name.startswith("__") else said
    draft.at(evidence.at("cause", incident.cause, f"waits for the device in every step: costs {share}", method))
    draft.because(
        f"a step takes {_ms(waited.step)}; the host waits here for {_ms(waited.waits)} of it, and the device "
        f"then has nothing to do for {_ms(waited.idle)}",
        "measured by the device itself in steps as they are, and in steps in which the host was ahead of it",
    )
    return _advised(draft, name, waited.uploads).done(severity="note" if waited.uploads else "warning")


def _advised(draft: Draft, name: str, uploads: bool) -> Draft:
    if uploads:
        return draft.help(
            "use `pin_memory=True` in the DataLoader, and `.to(device, non_blocking=True)`", safety="safe"
        )
    if name == "synchronize":
        return draft.help("remove it: kernels of one stream run in order without it", safety="safe")
    if name in ("cpu", "numpy", "tolist"):
        return draft.help("stay on the device, or do this once in many steps")
    return draft.help("do this once in many steps, or keep the tensor (`.detach()`) and read it a step later")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
