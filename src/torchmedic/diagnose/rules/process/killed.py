"""The process was killed: from outside, or by itself.

What: the process was ended by SIGKILL. SIGKILL cannot be caught, and Linux does not record the sender. If the script
kills itself by `os.kill`, that line is shown. Or another process sent SIGABRT, SIGSEGV, SIGBUS, SIGFPE or SIGILL, and
is named. Or one rank of a job was ended by SIGTERM, which its launcher did not get. Otherwise the line is the last
known line of the training.

Why: a person or a program sent the signal: `kill -9`, a scheduler whose time or memory limit was reached, a container
that was stopped, a watchdog. The kernel's OOM killer also sends SIGKILL, but it leaves a count in the cgroup and a line
in the kernel log; the diagnosis lists what could be read of both.

Cure: ask the scheduler first (`sacct -j JOB -o State,MaxRSS`, `kubectl describe pod`, `docker inspect`), then read the
kernel log (`dmesg`, as root).
"""

from __future__ import annotations

import time

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import draft_of, last_line, who
from torchmedic.diagnose.words.format import size
from torchmedic.records import BoxContents
from torchmedic.records.death import Death


@rule("TM805", "killed")
def check(death: Death) -> Draft | None:
    if death.from_outside:
        return _sent(death)
    if death.signal not in ("SIGKILL", "SIGTERM"):
        return None
    if death.signal == "SIGKILL" and death.threads and death.threads[0].current:
        return _own(death)
    draft = draft_of(
        check,
        death,
        "likely" if last_line(death) is not None else "possible",
        f"{who(death)} was killed from outside ({death.signal}); the sender is not known",
        f"the wait status says {death.signal}; the kernel does not keep who sent it",
    )
    if death.signal == "SIGTERM":
        return draft.help("find out who ends single ranks: a person, a watchdog, a guard of memory such as `earlyoom`")
    if death.oom_kills is None and not death.kernel_lines:
        draft.because("not ruled out: the kernel's OOM killer (neither its counter nor its log can be read here)")
    else:
        draft.because("the kernel's count of kills for memory did not rise, so its OOM killer was hardly the sender")
    limit = min((each for each in (death.memory_limit, death.host_memory) if each), default=None)
    if limit is not None and death.peak_rss:
        draft.because(f"the largest process of the run held {size(death.peak_rss)} of {size(limit)}")
    return draft.help("ask the scheduler or the container runtime why it ended the job; then `dmesg`")


def _own(death: Death) -> Draft:
    """A process that kills itself writes its stacks before; no other SIGKILL leaves any."""
    draft = draft_of(check, death, "proven", f"{who(death)} killed itself with SIGKILL", "the script calls `os.kill`")
    return draft.help(
        "raise an exception or call `sys.exit(1)` instead, so that files are closed and the reason is shown"
    )


def _sent(death: Death) -> Draft:
    """Another process sent a signal that native code usually brings upon its own process."""
    assert death.origin is not None
    sender = f"process {death.origin.pid}" + (f" (`{death.sender}`)" if death.sender else "")
    draft = draft_of(
        check,
        death,
        "proven",
        f"{who(death)} was killed from outside: {sender} sent it {death.signal}",
        f"the kernel told the process who sent {death.signal}; no fault of native code came before it",
    )
    return draft.help("ask whoever started that process why it sends the signal: a person, a watchdog, a scheduler")


def with_torchmedic(pid: int, box: BoxContents | None) -> Draft:
    """The end of a run whose torchmedic process was killed; the kernel then ends the script."""
    death = Death(pid=pid if box is None else box.pid, box=box, ended=time.time())
    draft = check.draft(death, "likely")
    draft.message = "the run was killed together with torchmedic, which could not say how it ended"
    draft.cause = f"the process of torchmedic ({pid}) is gone without a word: SIGKILL, or the machine went down"
    place = last_line(death)
    if place is not None:
        draft.at(place.location)
    draft.because("the black box is saved once a minute for this case, so the line may be older than the end")
    return draft.help("ask the scheduler or the container runtime why it ended the job; then `dmesg`")
