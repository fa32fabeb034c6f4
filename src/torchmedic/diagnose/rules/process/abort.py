"""Native code called `abort()` and ended the process.

What: compiled code called `abort()` (SIGABRT), because it found a state in which it cannot continue: an uncaught C++
exception (`terminate called ...`), a corrupted heap (`free(): invalid pointer`, `double free`), a failed assertion, an
error of the Python interpreter. The code prints its reason before the end.

Why: most often an extension that was built for another version of torch or linked against another C++ library, an
earlier out-of-range write of native code, or an error in a thread where no exception can be raised.

Cure: read the last line that was printed before the end; it names the check that failed. Then check the native function
that the marked line calls.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.process._fatal_signals import died_of
from torchmedic.diagnose.words.death import native_package
from torchmedic.records.death import Death


@rule("TM802", "abort")
def check(death: Death) -> Draft | None:
    draft = died_of("SIGABRT", check, death)
    if draft is None:
        return None
    package = native_package(death)
    if package:
        draft.help(f"read what was printed last; if it says nothing, update or reinstall `{package}`")
    else:
        draft.help("read what was printed last: it names the check that failed")
    return draft
