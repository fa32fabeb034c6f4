"""The learning rate is exactly zero: the weights never change.

What: every update multiplies the gradients by 0.

Why: the rate was computed with an integer division, a schedule multiplies the rate by 0 and never changes it again, or
a value was left over from an experiment.

Cure: give the optimizer a rate above zero. A warm-up may begin at zero, but its schedule must change the rate with
every step.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ZeroLearningRate
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM610", "zero-learning-rate", ZeroLearningRate)
def check(evidence: LoopEvidence, incident: ZeroLearningRate) -> Draft | None:
    updates = count(incident.updates, "update")
    draft = check.draft(evidence, "proven")
    draft.message = f"the weights do not change: the learning rate was exactly 0 in all of {updates}"
    draft.cause = "every group of the optimizer has a learning rate of 0"
    label, cure = "this optimizer has a rate of 0", "give it a learning rate above 0"
    if incident.first:
        draft.cause = f"the schedule makes 0 of a learning rate of {incident.first:g}"
        label, cure = "gives 0", "let the schedule give a factor above 0"
    if incident.is_whole:
        draft.message = f"the weights do not change: the learning rate was exactly 0 in each of the first {updates}"
        draft.cause = "an integer division gives 0 for each number that is smaller than the divisor"
        label, cure = "gives 0", "divide with `/` instead of `//`"
    draft.at(evidence.at("cause", incident.cause, label))
    draft.at(evidence.at("surfaced", incident.update, "changes nothing", "step"))
    if incident.scheduled:
        draft.because(f"its schedule has moved {incident.scheduled} times and the rate is still 0")
    draft.help(cure, safety="changes-training")
    return draft.rated("error" if incident.is_alone and not incident.is_whole else "warning")
