"""Native code divided an integer by zero.

What: compiled code did an integer division that has no result, and the processor stopped it (SIGFPE). In spite of its
name, the signal has nothing to do with floating point: NaN and infinity never raise it.

Why: an extension divides by a size, stride or count that is zero here, for example because a batch is empty.

Cure: check the sizes that the marked line passes to native code, and do not pass empty tensors.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.process._fatal_signals import died_of
from torchmedic.records.death import Death


@rule("TM807", "arithmetic-fault")
def check(death: Death) -> Draft | None:
    draft = died_of("SIGFPE", check, death)
    if draft is None:
        return None
    return draft.help("look for an empty batch, a size or a stride of zero in what this line hands to native code")
