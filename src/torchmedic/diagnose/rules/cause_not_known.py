"""The cause is not known.

No rule could prove, or even make likely, what ended the training. The diagnosis lists what was observed and what was
ruled out; nothing is guessed.

A plain Python exception (a missing key, a missing file) usually explains itself. Otherwise, attach `report.json` and
the black box from the run folder to a question or an issue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmedic.diagnose.rule import Evidence, Rule
from torchmedic.records import Diagnosis
from torchmedic.records.death import Death

if TYPE_CHECKING:
    from torchmedic.evidence.exception import RaisedEvidence
    from torchmedic.evidence.numbers import NumbersEvidence

CODE, NAME = "TM900", "cause-not-known"


def not_explained(evidence: RaisedEvidence | NumbersEvidence | Death) -> Diagnosis:
    if isinstance(evidence, Death):
        return _death(evidence)
    return _exception(evidence) if hasattr(evidence, "error") else _numbers(evidence)  # type: ignore[arg-type]


def _numbers(evidence: NumbersEvidence) -> Diagnosis:
    """NaN was seen, and no rule on numbers spoke; they end in one that always does, so this is for their faults."""
    incident = evidence.incident
    message = f"the {incident.quantity} is not finite in step {incident.step}"
    draft = RULE.draft(evidence, "possible", message, "where it was born is not known")
    draft.because(f"the step could not be replayed: {evidence.why_not}" if evidence.why_not else "")
    return draft.done()


def _exception(evidence: RaisedEvidence) -> Diagnosis:
    first_line = evidence.message.strip().splitlines()[0] if evidence.message.strip() else "no message"
    incident = evidence.incident
    draft = RULE.draft(
        evidence,
        "possible",
        f"the script stopped with {evidence.kind}, and no rule explains it",
        f"{evidence.kind}: {first_line[:200]}",
    )
    draft.at(*evidence.at_user_line("cause", "raised here"))
    draft.because(f"in step {incident.step}, phase {incident.phase}")
    call = evidence.call
    if call is not None and call.tensors:
        described = ", ".join(
            f"`{argument.text}` {list(argument.value.shape)} {argument.value.dtype} on {argument.value.device}"
            for argument in call.tensors
        )
        draft.because(f"`{call.op}` was given {described}")
    draft.because("ruled out: every registered rule was asked, and none found its evidence")
    return draft.done()


def _death(death: Death) -> Diagnosis:
    how = f"signal {death.signal}" if death.signal else f"exit status {death.exit_status}"
    draft = RULE.draft(death, "possible", f"the process ended without a word ({how})", "no evidence says what ended it")
    moment = death.box.last if death.box is not None else None
    if moment is not None:
        draft.because(f"last seen in step {moment.step}, phase {moment.phase}, at {moment.file}:{moment.line}")
    return draft.done(step=moment.step if moment is not None else None)


RULE: Rule[Evidence] = Rule(CODE, NAME, lambda evidence: None)
