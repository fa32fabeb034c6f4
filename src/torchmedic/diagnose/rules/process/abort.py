"""Native code gave up and ended the process.

What: compiled code called `abort()` (SIGABRT). It does so when it finds a state that it cannot go on with: a C++
exception that nobody catches (`terminate called ...`), a heap that was written over (`free(): invalid pointer`,
`double free`), a failed assertion, an error of Python's own interpreter. Its reason is printed above, by itself.

Why: most often an extension that was built for another version of torch or linked against another C++ library, an
out-of-range write of native code some time before, or an error in a thread where no exception can be raised.

Cure: read the last line that was printed before the end; it names the check that failed. Then look at what the marked
line calls into.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Rule
from torchmedic.diagnose.words.death import draft_of, line_grade, native_package, shutting_down, who
from torchmedic.records import Diagnosis
from torchmedic.records.death import Death

CODE, NAME = "TM802", "abort"


def check(death: Death) -> Diagnosis | None:
    if death.signal != "SIGABRT":
        return None
    when = " while the interpreter was shutting down" if shutting_down(death) else ""
    draft = draft_of(
        RULE,
        death,
        line_grade(death),
        f"{who(death)} was aborted by its own native code{when}",
        "compiled code called `abort()` (SIGABRT); what it printed just before is its reason",
    )
    package = native_package(death)
    if package:
        draft.help(f"read what was printed last; if it says nothing, update or reinstall `{package}`")
    else:
        draft.help("read what was printed last: it names the check that failed")
    return draft.done()


RULE = Rule(CODE, NAME, check)
