"""`torchmedic attach`: look, judge, and report what was found and what could not be read."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys

import msgspec

from torchmedic.diagnose import registry
from torchmedic.diagnose.rules.hangs import waits_for_collective
from torchmedic.diagnose.rules.hangs.slow import long_work
from torchmedic.errors import UsageError
from torchmedic.records import Diagnosis, Outcome, Report
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall
from torchmedic.supervise.attach import looks
from torchmedic.supervise.attach.stacks import NO_PYSPY
from torchmedic.supervise.attach.targets import root_of_job
from torchmedic.supervise.attach.verdict import Verdict, judge
from torchmedic.supervise.host.cgroups import text
from torchmedic.supervise.job import same_finding
from torchmedic.supervise.proc import process
from torchmedic.supervise.proc.process import PROC, status_words
from torchmedic.supervise.proc.pyspy import NOT_PERMITTED

_CAPABILITY = "in a container: `docker run --cap-add SYS_PTRACE`"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`lines` are printed if there is no diagnosis. `notes` say what could not be read, and how to permit it."""

    hung: bool
    diagnoses: tuple[Diagnosis, ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> Report:
        return Report(outcome=Outcome(symptom="hang" if self.hung else None), diagnoses=self.diagnoses)


def attach(
    pid: int, *, seconds: float, native: bool = False, rules: registry.Family[Stall] = registry.STALLED
) -> Answer:
    """A verdict on a process and its descendants.

    Raises:
        UsageError: There is no such process, or it may not be read.
    """
    pid = root_of_job(resolve(pid))
    seen = looks.look(pid, seconds=seconds, native=native)
    if not seen.processes or seen.processes[0].state in "ZX":
        raise UsageError(f"process {pid} ended while it was looked at")
    if not seen.stalls:
        name = seen.processes[0].name
        raise UsageError(f"process {pid} ({name}) is no Python process, and has started none")
    verdicts = {stall.pid: judge(stall, rules) for stall in seen.stalls}
    hung = _roots(seen.stalls, {number: each for number, each in verdicts.items() if each.state == "hung"}, rules)
    return Answer(
        hung=bool(hung),
        diagnoses=_distinct(hung or list(verdicts.values())),
        lines=() if hung else tuple(dict.fromkeys(_line(verdict, seconds) for verdict in verdicts.values())),
        notes=(*([] if hung else _reservations(seen, list(verdicts.values()))), *_notes(seen)),
    )


def _roots(stalls: tuple[Stall, ...], hung: dict[int, Verdict], rules: registry.Family[Stall]) -> list[Verdict]:
    """The verdicts to report: of a hung process and a hung descendant, the one with the more specific reason.

    The rules are ordered from specific to general. If both have the same reason, the ancestor is reported, because its
    diagnosis names both. If there is no reason, the descendant is reported, because the ancestor waits for it.
    """
    order = [registry.load(rule).code for rule in rules]
    below = {stall.pid: {view.pid for view in stall.processes} - {stall.pid} for stall in stalls}

    def place(pid: int) -> int:
        found = hung[pid].diagnosis
        return order.index(found.code) if found is not None and found.code in order else len(order)

    def is_echo(pid: int) -> bool:
        unknown = place(pid) >= len(order) - 1
        above = any(place(other) < place(pid) + (not unknown) for other in hung if pid in below[other])
        return above or any(place(other) < place(pid) + unknown for other in hung if other in below[pid])

    return [verdict for pid, verdict in hung.items() if not is_echo(pid)]


def _distinct(verdicts: list[Verdict]) -> tuple[Diagnosis, ...]:
    """The diagnoses. One that several ranks share is listed once, and so is that ranks wait for each other."""
    found: dict[object, list[Diagnosis]] = {}
    for verdict in verdicts:
        diagnosis = verdict.diagnosis
        if diagnosis is not None:
            mutual = diagnosis.code == waits_for_collective.check.code
            found.setdefault(diagnosis.code if mutual else same_finding(diagnosis), []).append(diagnosis)
    return tuple(_merged(group) for group in found.values())


def _merged(group: list[Diagnosis]) -> Diagnosis:
    first, *others = group
    if not others:
        return first
    ranks = sorted({each.rank for each in group})
    if len(ranks) == 1 or len({same_finding(each) for each in group}) > 1:
        return first
    same = f"the same holds for {len(ranks)} ranks: {', '.join(map(str, ranks))}"
    return msgspec.structs.replace(first, evidence=(*first.evidence, same))


def _line(verdict: Verdict, seconds: float) -> str:
    if verdict.diagnosis is not None:
        return f"not hung: {verdict.diagnosis.message}"
    if verdict.state == "moves":
        return f"not hung, as far as {seconds:.3g} s can tell: {verdict.words}"
    return f"no hang was found in {seconds:.3g} s: {verdict.words}"


def _reservations(seen: looks.Seen, verdicts: list[Verdict]) -> list[str]:
    """Warnings about what a look from outside cannot tell."""
    busy = any(each.diagnosis is not None and each.diagnosis.code == long_work.check.code for each in verdicts)
    return ["a loop without an end looks the same from outside; `torchmedic run` counts steps"] * (
        busy and seen.run is None
    )


def _notes(seen: looks.Seen) -> list[str]:
    notes = []
    if seen.no_stacks == NO_PYSPY:
        notes.append("not seen: Python stacks; `pip install 'torchmedic[py-spy]'` adds them")
    elif seen.no_stacks:
        how = f": try {with_sudo(seen.processes[0].pid)}" if seen.no_stacks == NOT_PERMITTED else ""
        notes.append(f"not seen: Python stacks ({seen.no_stacks}){how}")
    if seen.unseen:
        notes.append(f"not seen: Python stacks of process {', '.join(map(str, seen.unseen))}; look again")
    closed = next((view for view in seen.processes if view.state not in "ZX" and not view.open_to_us), None)
    if closed is not None:
        notes.append(hidden(closed))
    if seen.run is not None:
        notes.append(f"this is a run of torchmedic, which sees more from inside: `torchmedic report {seen.run}`")
    return notes


def resolve(pid: int) -> int:
    """The process of a pid; the number of a thread stands for its process.

    Raises:
        UsageError: There is no such process, or it may not be read.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError("attach needs the /proc of Linux; elsewhere try `py-spy dump --pid PID`")
    group = status_words(f"{PROC}/{pid}/status", "Tgid")
    if not group:
        raise UsageError(f"there is no process {pid} here (in a container, only its own processes can be seen)")
    pid = int(group[0])
    view = process.read(pid)
    if view is None:
        raise UsageError(f"process {pid} has just ended")
    if view.state in "ZX":
        raise UsageError(
            f"process {pid} ({view.name}) is dead{_how(view)}; its parent {view.parent} has not waited for it"
        )
    if not view.command and (pid == 2 or view.parent == 2):
        raise UsageError(f"{pid} ({view.name}) is a thread of the kernel")
    _check_owner(view)
    return pid


def _how(view: ProcessView) -> str:
    if not view.exit_status:
        return ""
    how = f"signal {-view.exit_status}" if view.exit_status < 0 else f"exit status {view.exit_status}"
    return f" ({how})"


def _check_owner(view: ProcessView) -> None:
    """Refuse a process that may not be read, because it belongs to another user or is closed to tracing."""
    owner = _owner(view.pid)
    if owner is None or view.open_to_us or os.access(f"{PROC}/{view.pid}/fd", os.R_OK):
        return
    if owner == os.geteuid():
        raise UsageError(f"process {view.pid} ({view.name}) is closed to tracing: try {with_sudo(view.pid)}")
    name = _name(owner)
    raise UsageError(f"process {view.pid} ({view.name}) belongs to {name}: try {with_sudo(view.pid, name)}")


def with_sudo(pid: int, user: str = "root") -> str:
    """The command to type. It has a full path, because sudo does not keep PATH."""
    whose = "" if user == "root" else f" -u {user}"
    return f"`sudo{whose} {sys.executable} -m torchmedic attach {pid}`, or {_CAPABILITY}"


def _owner(pid: int) -> int | None:
    words = status_words(f"{PROC}/{pid}/status", "Uid")
    return int(words[1]) if len(words) > 1 else None


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return f"#{user}"


def hidden(view: ProcessView) -> str:
    """Why the system calls of the user's own process cannot be read, and how to permit it; empty if they can."""
    if view.open_to_us:
        return ""
    scope = (text(f"{PROC}/sys/kernel/yama/ptrace_scope") or "").strip()
    if scope in ("1", "2"):
        return (
            f"not seen: system calls and memory of the process (kernel.yama.ptrace_scope is {scope}): "
            f"`sudo sysctl kernel.yama.ptrace_scope=0`, or {with_sudo(view.pid)}"
        )
    if scope == "3":
        return "not seen: system calls and memory of the process (kernel.yama.ptrace_scope is 3, until the next start)"
    return f"not seen: system calls and memory of the process: try {with_sudo(view.pid)}"
