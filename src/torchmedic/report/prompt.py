"""A report as a compact text for an assistant: what was found, how it is known, what was tried."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchmedic.records import Diagnosis, Outcome, Report
from torchmedic.records.plain_text import clipped, one_line, visible
from torchmedic.report import terminal
from torchmedic.report.terminal import proof
from torchmedic.repro.wording import recorded_call

DEFAULT_TOKENS = 1500
MIN_TOKENS = 100
_CHARACTERS_PER_TOKEN = 4
_MAX_FIELD = 600  # characters of one fact; long ones are lists of values
_MIN_SECTION = 80  # characters; less of a section tells nothing
_CUT = "\n[cut: see report.json]"


def document(report: Report, shown: Iterable[Diagnosis], run: Path | None, tokens: int = DEFAULT_TOKENS) -> str:
    """A self-contained text of at most `tokens` tokens, counted as four characters each.

    The most important sections come first; the section that does not fit is cut, and the rest is left out.
    """
    room = max(tokens, MIN_TOKENS) * _CHARACTERS_PER_TOKEN - len(_CUT) - 1
    found = list(shown)
    sections = [_head(report.outcome, len(found))]
    for number, diagnosis in enumerate(found):
        sections += _sections(diagnosis, run if number == 0 else None)
    if run is not None and found:
        script = f"`torchmedic repro {run}` writes a script of the failing operation; "
        sections.append(
            f"MORE: `torchmedic explain {visible(found[0].code)}` explains the code; "
            f"{script if recorded_call(run, found[0]) else ''}{run / 'report.json'} holds all of this."
        )
    text = ""
    for section in sections:
        left = room - len(text)
        if len(section) + 2 > left:
            part = section[:left].rstrip() if left >= _MIN_SECTION else ""
            return (text + part).rstrip("\n") + _CUT + "\n"
        text += f"{section}\n\n"
    return text.rstrip("\n") + "\n"


def _head(outcome: Outcome, count: int) -> str:
    ended = "it still runs"
    if outcome.signal:
        ended = f"it was ended by {visible(outcome.signal)}"
    elif outcome.exit_status is not None:
        ended = f"its exit status was {outcome.exit_status}"
    findings = "torchmedic found nothing wrong" if not count else f"torchmedic found {count} problem{'s' * (count > 1)}"
    return (
        f"A PyTorch training run was watched by torchmedic. After {outcome.steps} steps {ended}; {findings}. "
        "Everything below was measured on that run. `proven` was shown by evidence or by a replay of the failing step, "
        "`likely` and `possible` were not."
    )


def _sections(diagnosis: Diagnosis, run: Path | None) -> list[str]:
    step = f", step {diagnosis.step}" if diagnosis.step is not None else ""
    sections = [
        f"VERDICT: {diagnosis.severity}[{visible(diagnosis.code)}] {_field(diagnosis.message)}{step}\n"
        f"CAUSE ({diagnosis.grade}): {_field(diagnosis.cause)}"
    ]
    frame = terminal.plain_frames(diagnosis, 120)
    if frame:
        sections.append(f"SOURCE (^ marks the cause):\n{visible(frame)}")
    if diagnosis.evidence:
        sections.append("EVIDENCE:\n" + "\n".join(f"- {_field(fact)}" for fact in diagnosis.evidence))
    for treatment in diagnosis.treatments:
        patch = f"\n{visible(treatment.patch).rstrip()}" if treatment.patch else ""
        sections.append(f"CURE: {_field(treatment.title)} [{_field(proof(treatment))}]{patch}")
    recorded = recorded_call(run, diagnosis) if run is not None else ""
    if recorded:
        sections.append(f"FAILING OPERATION:\n{visible(recorded)}")
    return sections


def _field(text: str) -> str:
    return clipped(one_line(text), _MAX_FIELD)
