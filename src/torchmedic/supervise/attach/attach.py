"""`torchmedic attach`: look, judge, and put into words what was found and what could not be seen."""

from __future__ import annotations

import msgspec

from torchmedic.diagnose import registry
from torchmedic.errors import UsageError
from torchmedic.records import Diagnosis, Outcome, Report
from torchmedic.supervise.attach import access, looks
from torchmedic.supervise.attach.verdict import Verdict, judge
from torchmedic.supervise.job import same_finding


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`lines` are for a person who sees no diagnosis, `notes` are what could not be seen and how to see it."""

    hung: bool
    diagnoses: tuple[Diagnosis, ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> Report:
        return Report(outcome=Outcome(symptom="hang" if self.hung else None), diagnoses=self.diagnoses)


def attach(pid: int, *, seconds: float, native: bool = False, rules: tuple[str, ...] = registry.STALLED) -> Answer:
    """A verdict on a process and all that it started.

    Raises:
        UsageError: There is nothing to look at, or it is not for us.
    """
    pid = access.resolve(pid)
    seen = looks.look(pid, seconds=seconds, native=native)
    if not seen.processes:
        raise UsageError(f"process {pid} ended while it was looked at")
    if not seen.stalls:
        name = seen.processes[0].name
        raise UsageError(f"process {pid} ({name}) is no Python process, and has started none")
    verdicts = [judge(stall, rules) for stall in seen.stalls]
    hung = [verdict for verdict in verdicts if verdict.state == "hung"]
    return Answer(
        hung=bool(hung),
        diagnoses=_distinct(hung or verdicts),
        lines=() if hung else tuple(dict.fromkeys(_line(verdict, seconds) for verdict in verdicts)),
        notes=tuple(_notes(seen)),
    )


def _distinct(verdicts: list[Verdict]) -> tuple[Diagnosis, ...]:
    """What several ranks have in common is told once, of the first."""
    found: dict[object, list[Diagnosis]] = {}
    for verdict in verdicts:
        if verdict.diagnosis is not None:
            found.setdefault(same_finding(verdict.diagnosis), []).append(verdict.diagnosis)
    return tuple(_of_all(group) for group in found.values())


def _of_all(group: list[Diagnosis]) -> Diagnosis:
    first, *others = group
    if not others:
        return first
    ranks = ", ".join(str(each.rank) for each in group)
    return msgspec.structs.replace(first, evidence=(*first.evidence, f"the same holds for {len(group)} ranks: {ranks}"))


def _line(verdict: Verdict, seconds: float) -> str:
    if verdict.diagnosis is not None:
        return f"not hung: {verdict.diagnosis.message}"
    if verdict.state == "moves":
        return f"not hung, as far as {seconds:.3g} s can tell: {verdict.words}"
    return f"no hang was found in {seconds:.3g} s: {verdict.words}"


def _notes(seen: looks.Seen) -> list[str]:
    notes = []
    if seen.no_stacks == "py-spy is not installed":
        notes.append("not seen: Python stacks; `pip install 'torchmedic[py-spy]'` adds them")
    elif seen.no_stacks:
        notes.append(f"not seen: Python stacks ({seen.no_stacks})")
    closed = next((view for view in seen.processes if view.state not in "ZX" and not view.open_to_us), None)
    if closed is not None:
        notes.append(access.hidden(closed))
    if seen.run is not None:
        notes.append(f"this is a run of torchmedic, which sees more from inside: `torchmedic report {seen.run}`")
    return notes
