"""Signals that native code brings upon its own process: what they mean, and the part of the diagnosis that is alike."""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.diagnose.words.death import draft_of, line_grade, shutting_down, who
from torchmedic.records.death import Death

# The end of "the process ...", and the cause. `{when}` says that the script itself was over.
_SIGNALS = {
    "SIGABRT": (
        "was aborted by its own native code{when}",
        "compiled code called `abort()` (SIGABRT); what it printed just before is its reason",
    ),
    "SIGBUS": ("died of a bus error", "the page of a mapped file or of shared memory could not be had (SIGBUS)"),
    "SIGFPE": (
        "died of an integer division without a result",
        "compiled code divided an integer by zero, or the smallest integer by -1 (SIGFPE)",
    ),
    "SIGILL": (
        "died of an instruction that this processor does not know",
        "compiled code reached an illegal instruction (SIGILL)",
    ),
    "SIGSEGV": (
        "died of a segmentation fault{when}",
        "compiled code read or wrote an address that is not its own (SIGSEGV)",
    ),
}


def died_of(signal: str, rule: Rule[Death], death: Death) -> Draft | None:
    """The draft of a death by this signal; None if the process died of something else."""
    if death.signal != signal:
        return None
    what, cause = _SIGNALS[signal]
    when = " while the interpreter was shutting down" if shutting_down(death) else ""
    return draft_of(rule, death, line_grade(death), f"{who(death)} {what.format(when=when)}", cause)
