"""The processor does not support an instruction of a compiled library.

What: compiled code reached an instruction that this processor cannot execute (SIGILL).

Why: a wheel or an extension was built for a newer processor (AVX2, AVX-512, AMX) than this one, often because it was
compiled with `-march=native` on another machine of the cluster, or a virtual machine hides features of its host. More
rarely native code reached a deliberate trap after a failed check.

Cure: install a build for this processor, or build the extension on the machine that runs it.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.process._fatal_signals import died_of
from torchmedic.diagnose.words.death import native_package
from torchmedic.records.death import Death


@rule("TM804", "illegal-instruction")
def check(death: Death) -> Draft | None:
    draft = died_of("SIGILL", check, death)
    if draft is None:
        return None
    package = native_package(death)
    what = f"`{package}`" if package else "the library that is called here"
    return draft.help(f"install or build {what} for the processor of this machine (`lscpu` lists what it can do)")
