"""The cause is not known.

No rule could prove, or even make likely, what ended the training. The diagnosis lists what was observed and what was
ruled out; nothing is guessed.

A plain Python exception (a missing key, a missing file) explains itself: it is in the report, and nothing is printed
after its traceback. Otherwise, attach `report.json` and the black box from the run folder to a question or an issue.
"""

from __future__ import annotations

import multiprocessing
import re
import threading
from typing import TYPE_CHECKING

from msgspec.structs import replace

from torchmedic.diagnose.rule import Evidence, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import at_moment, listed
from torchmedic.records import Diagnosis, StackFrame
from torchmedic.records.death import Death
from torchmedic.source.user_code import is_user_file

if TYPE_CHECKING:
    from torchmedic.evidence.exception import RaisedEvidence
    from torchmedic.evidence.numbers import NumbersEvidence


_MAX_TENSORS = 6  # that are described
_REMOTE = ("RemoteTraceback", "_RemoteTraceback")  # of multiprocessing and of concurrent.futures
_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@rule("TM900", "cause-not-known")
def check(evidence: Evidence) -> None:
    """Claims nothing: `not_explained` is asked where every rule is silent."""


def not_explained(evidence: RaisedEvidence | NumbersEvidence | Death) -> Diagnosis:
    if isinstance(evidence, Death):
        return _death(evidence)
    return _exception(evidence) if hasattr(evidence, "error") else _numbers(evidence)  # type: ignore[arg-type]


def _numbers(evidence: NumbersEvidence) -> Diagnosis:
    """NaN was seen, and no rule on numbers spoke; they end in one that always does, so this is for their faults."""
    incident = evidence.incident
    message = f"the {incident.quantity} is not finite in step {incident.step}"
    draft = check.draft(evidence, "possible", message, "where it was born is not known")
    draft.because(f"the step could not be replayed: {evidence.why_not}" if evidence.why_not else "")
    return draft.done()


def _exception(evidence: RaisedEvidence) -> Diagnosis:
    first_line = evidence.message.strip().splitlines()[0] if evidence.message.strip() else "no message"
    incident = evidence.incident
    remote = [frame for frame in remote_frames(evidence.error) if is_user_file(frame.file)]
    draft = check.draft(evidence, "possible")
    draft.message = f"{_who(in_child=bool(remote))} stopped with {evidence.kind}, and no rule explains it"
    draft.cause = f"{evidence.kind}: {first_line[:200]}"
    if remote:
        draft.at(line_location("cause", remote[-1].file, remote[-1].line, "raised here, in a child process"))
        draft.at(*evidence.at_user_line("surfaced", "raised again here"))
    else:
        draft.at(*evidence.at_user_line("cause", "raised here"))
    draft.because(at_moment(incident.step, incident.phase))
    call = evidence.call
    if call is not None and call.tensors:
        described = [
            f"`{argument.text}` {list(argument.value.shape)} {argument.value.dtype} on {argument.value.device}"
            for argument in call.tensors
        ]
        draft.because(f"`{call.op}` was given {listed(described, _MAX_TENSORS)}")
    draft.because("ruled out: every registered rule was asked, and none found its evidence")
    return replace(draft.done(), in_traceback=not _says_more(evidence))


def _who(*, in_child: bool) -> str:
    child = multiprocessing.current_process() if multiprocessing.parent_process() is not None else None
    if child is not None:
        return f"the child process `{child.name}`"
    if threading.current_thread() is not threading.main_thread():
        return f"the thread `{threading.current_thread().name}`"
    return "a child process of the script" if in_child else "the script"


def _says_more(evidence: RaisedEvidence) -> bool:
    """Whether the diagnosis says what the traceback does not: shapes and devices, or that torch's rules are silent."""
    if evidence.from_loader or (evidence.call is not None and evidence.call.tensors):
        return True
    of_torch = type(evidence.error).__module__.partition(".")[0] == "torch"
    return of_torch or ("RuntimeError" in evidence.kinds and evidence.is_torchs)


def _death(death: Death) -> Diagnosis:
    how = f"signal {death.signal}" if death.signal else f"exit status {death.exit_status}"
    draft = check.draft(
        death, "possible", f"the process ended without a word ({how})", "no evidence says what ended it"
    )
    moment = death.box.last if death.box is not None else None
    if moment is not None:
        draft.because(f"last seen {at_moment(moment.step, moment.phase)}, at {moment.file}:{moment.line}")
    return draft.done(step=moment.step if moment is not None else None)


def remote_frames(error: BaseException) -> list[StackFrame]:
    """The frames in the child process, outermost first; none if the exception was raised in this process."""
    cause = error.__cause__
    text = getattr(cause, "tb", None) if type(cause).__name__ in _REMOTE else None
    if not isinstance(text, str):
        return []
    return [StackFrame(file=match[1], line=int(match[2]), function=match[3]) for match in _FRAME.finditer(text)]
