"""The run waits for a lock on a file.

What: a process waits in `flock` or `fcntl`, or loops as long as a lock file exists. The diagnosis names the holder with
its command line; for a lock file it shows the age of the file and whether the process that wrote it still exists.

Why: the same process has already locked the file, through another descriptor; the holder waits for this run, is
stopped, or has passed the open file on to a child; a killed run left a lock file behind, and no process will ever
remove it.

Cure: end the holder, or remove a stale lock file (`rm FILE`). In code: use one lock object, close the file before
waiting, set a time limit for the wait (`FileLock(path, timeout=60)`). The kernel releases a `flock` lock when its
process ends; a lock file that a script creates itself remains.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import helpers
from torchmedic.diagnose.rules.hangs._counterparts import (
    described,
    doing,
    find,
    hopeless,
    patience_is_over,
    waits_for_all_ranks,
)
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule
from torchmedic.records import Grade, Severity
from torchmedic.records.inside import LockFile
from torchmedic.records.process import LockHeld
from torchmedic.records.stall import Stall
from torchmedic.source.user_code import relative

_CLOCK_ERROR_SECONDS = 1.5  # seconds


@stall_rule("TM522", "file-lock-held")
def check(stall: Stall) -> Draft | None:
    for waiter in reversed(chain(stall)):
        lock = next((lock for lock in waiter.process.locks if lock.tid == waiter.row.tid), None)
        if lock is not None and waiter.stands(stall):
            return _held(stall, waiter, lock)
        file = waiter.python.lock_file if waiter.python is not None else None
        if file is not None:
            return _polled(stall, waiter, file)
    return None


def _held(stall: Stall, waiter: Waiter, lock: LockHeld) -> Draft:
    own = lock.holder == waiter.process.pid
    grade: Grade = "proven"
    severity: Severity = "error"
    if own:
        severity = "note" if any(helper.known for helper in helpers(stall)) else "error"
    elif not lock.holder or not lock.holder_lives:
        grade = "likely"
        severity = "note" if lock.holder and doing(stall, lock.holder) == "goes on" else "error"
    elif not hopeless(stall, [lock.holder]):
        grade = "likely"
        severity = "warning" if patience_is_over(stall, [lock.holder]) else "note"
    holder = "it holds itself" if own else "the same file's heir holds" if not lock.holder_lives else "another holds"
    name = relative(lock.path)
    if severity == "note":
        message = f"not hung: the run waits for a lock on `{name}`, and the process that holds it is alive"
    else:
        message = f"the run waits for a lock on `{name}` that " + (
            "it holds itself" if own else "nobody gives back" if grade == "proven" else "another process holds"
        )
    cause = f"the lock ({lock.kind}) is one that {holder}: {_holder(stall, lock)}"
    return _told(stall, waiter, grade, message, cause, _advice(stall, lock, own=own), severity)


def _holder(stall: Stall, lock: LockHeld) -> str:
    if find(stall, lock.holder) is not None or waits_for_all_ranks(stall, lock.holder):
        words = described(stall, lock.holder)
    else:
        words = f"process {lock.holder}" + (f" (`{lock.command[:80]}`)" if lock.command else "")
    return words + (f", started {duration(lock.age)} ago" if lock.age is not None else "")


def _advice(stall: Stall, lock: LockHeld, *, own: bool) -> str:
    if own:
        return "take the lock only once: reuse the open file that holds it, or close that file before the second lock"
    if waits_for_all_ranks(stall, lock.holder):
        return "give the lock back before a call that waits for all ranks"
    if not lock.holder_lives:
        return f"end process {lock.holder}, which inherited the open file; `close_fds=True` keeps files from children"
    return f"check what process {lock.holder} does, and end it if it is not needed"


def _polled(stall: Stall, waiter: Waiter, file: LockFile) -> Draft | None:
    name = relative(file.path)
    age = f"it is {duration(file.age)} old"
    severity: Severity = "note"
    cause = f"`{name}` exists; {age}"
    if file.holder:
        holder = command(find(stall, file.holder), file.holder)
        cause = f"`{name}` is locked by {holder}" + (f" (`{file.command[:80]}`)" if file.command else "")
        severity = "error" if file.holder == waiter.process.pid else "note"
        if severity == "note" and patience_is_over(stall, [file.holder]):
            severity = "warning"
    elif file.by_kernel:
        severity = "warning" if patience_is_over(stall, []) else "note"
    elif file.writer is not None and not file.writer_lives:
        cause = f"`{name}` was left by process {file.writer}, which is gone; {age}"
        severity = "error"
    elif file.writer is None and _is_older(stall, waiter, file):
        cause = f"`{name}` is older than this run ({duration(file.age)}), and names no process"
        severity = "error"
    if severity == "note":
        message = f"not hung: the run waits until `{name}` is removed"
    else:
        message = f"the run waits for the lock file `{name}`, which no process removes"
    return _told(stall, waiter, "likely", message, cause, f"if no other run uses it: `rm {name}`", severity)


def _is_older(stall: Stall, waiter: Waiter, file: LockFile) -> bool:
    """Whether the file was there before the process that waits: the kernel tells its start not to the second."""
    view = stall.inside.get(waiter.process.pid)
    return view is not None and file.age - _CLOCK_ERROR_SECONDS > view.time - waiter.process.started > 0


def _told(
    stall: Stall, waiter: Waiter, grade: Grade, message: str, cause: str, advice: str, severity: Severity
) -> Draft:
    draft = check.draft(stall, grade, message, cause)
    draft.at(at(waiter.frame, "cause", "waits for the lock here") or main_line(stall, "cause", "waits here"))
    draft.at(main_line(stall))
    draft.help(advice)
    return draft.rated(severity)
