"""Native code accessed invalid memory.

What: the processor rejected a memory access of compiled code, and the kernel ended the process (SIGSEGV). Python could
not raise an exception; the line is from a dump that was written at that moment.

Why: a compiled extension that was built for another version of Python or torch, a wrong pointer or type given to
ctypes, an index that a kernel does not check, a recursion so deep that the C stack overflows, or an object that one
thread freed while another thread used it.

Cure: check the line and the function that it calls. Rebuild or update the extension, check the arguments, and limit the
recursion. A native debugger shows the function: `gdb -ex run -ex bt --args python train.py`.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.process._fatal_signals import died_of
from torchmedic.diagnose.words.death import native_package, overflowed
from torchmedic.records.death import Death


@rule("TM801", "segmentation-fault")
def check(death: Death) -> Draft | None:
    draft = died_of("SIGSEGV", check, death)
    if draft is None:
        return None
    package = native_package(death)
    if overflowed(death):
        draft.because("the stack is at least 100 Python calls deep: endless recursion overflows the stack of C")
        draft.help("bound the recursion, or give the stack more room (`ulimit -s`)")
    elif package == "ctypes":
        draft.help("check the pointers and the `argtypes` of the foreign function that is called here")
    elif package:
        draft.help(f"update or reinstall `{package}` so that it was built for this Python and this torch")
    else:
        draft.help("find the C function with `gdb -ex run -ex bt --args python ...`, and check what it is given here")
    return draft
