"""`torchmedic attach`: look, judge, and report what was found and what could not be read."""

from __future__ import annotations

import msgspec

from torchmedic.diagnose import registry
from torchmedic.diagnose.rules.hangs import long_work, waits_for_collective
from torchmedic.errors import UsageError
from torchmedic.records import Diagnosis, Outcome, Report
from torchmedic.records.stall import Stall
from torchmedic.supervise.attach import access, looks
from torchmedic.supervise.attach.stacks import NO_PYSPY
from torchmedic.supervise.attach.targets import root_of_job
from torchmedic.supervise.attach.verdict import Verdict, judge
from torchmedic.supervise.job import same_finding
from torchmedic.supervise.proc.pyspy import NOT_PERMITTED


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
    pid = root_of_job(access.resolve(pid))
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
        how = f": try {access.with_sudo(seen.processes[0].pid)}" if seen.no_stacks == NOT_PERMITTED else ""
        notes.append(f"not seen: Python stacks ({seen.no_stacks}){how}")
    if seen.unseen:
        notes.append(f"not seen: Python stacks of process {', '.join(map(str, seen.unseen))}; look again")
    closed = next((view for view in seen.processes if view.state not in "ZX" and not view.open_to_us), None)
    if closed is not None:
        notes.append(access.hidden(closed))
    if seen.run is not None:
        notes.append(f"this is a run of torchmedic, which sees more from inside: `torchmedic report {seen.run}`")
    return notes
