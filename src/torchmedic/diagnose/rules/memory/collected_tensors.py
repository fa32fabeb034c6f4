"""A container of the loop collects tensors until memory is full.

What: a list, dict or buffer that the loop fills holds a large part of the memory. The tensors in it have no graph any
more; there are simply too many of them.

Why: outputs, features or batches are collected on the device for a metric at the end; a replay buffer has no bound.

Cure: move what is collected to the host (`.cpu()`), reduce it first (`.argmax()`, `.mean()`), or bound the container.
"""

from __future__ import annotations

from torchmedic.diagnose.describe import count
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.memory.autopsy import autopsy_of
from torchmedic.replay.memory.fillers import fillers_of
from torchmedic.replay.step import Step

CODE, NAME = "TM412", "collected-tensors"

_SHARE = 0.25  # of all tensors
_SEVERAL = 8


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None:
        return None
    step = autopsy.step
    for holder, nbytes, number in autopsy.holders()[:3]:
        if nbytes < _SHARE * autopsy.book.everything or number < _SEVERAL or autopsy.is_of_failing_call(holder):
            continue
        if nbytes < (autopsy.asked or 0):
            continue
        # It must be the loop that fills it: a data set in memory is filled before.
        filler = next((each for each in fillers_of(holder) if each.in_loop), None)
        if filler is None or step is None or not _is_run_again(filler.file, filler.node.lineno, step):
            continue
        draft = Draft(
            CODE,
            NAME,
            "proven",
            f"`{holder.path}` has collected {size(nbytes)} in {count(number, 'tensor')}",
            f"the loop puts in more and takes none out; {size(autopsy.asked or 0)} more were asked for",
        )
        draft.at(filler.location("cause", f"`{holder.path}` is filled here"), *noticed(autopsy))
        shown(draft, autopsy)
        where = "move it to the host first (`.cpu()`)" if autopsy.exhaustion.on_device else "reduce it first"
        draft.help(f"{where}, keep only what is needed later, or bound the container")
        return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)
    return None


def _is_run_again(file: str, line: int, step: Step) -> bool:
    """Whether a line stands in the loop of the step, or in a function elsewhere, which the step may call."""
    segment, frame = step.segment, step.frame
    if file != frame.f_code.co_filename or frame.f_code.co_name != "<module>":
        return True
    return line >= segment.lines[0]


RULE = Rule(CODE, NAME, check)
