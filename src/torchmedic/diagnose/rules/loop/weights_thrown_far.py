"""The learning rate is so high that a few updates made the weights of every layer many times larger.

What: before the first update each layer had weights of the usual size. After some dozens of updates the weights of
every layer are at least ten times as large. The loss need not grow: it may stand still at a high or at a low level.

Why: Adam changes each weight by about the learning rate in each update. A rate of 0.5 or 5 is larger than the weights
themselves, so the first updates replace the weights. Activations become saturated or dead, and nothing learns.

Cure: lower the learning rate: 1e-3 is usual for Adam, 0.01 to 0.1 for SGD.
"""

from __future__ import annotations

import sys

from torchmedic.detect.loop.incident import WeightsThrown
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.live_frames import stack_of
from torchmedic.source.lookup.named_numbers import value_written_at
from torchmedic.source.lookup.optimizers import rate_given_at


@loop_rule("TM656", "weights-thrown-far", WeightsThrown)
def check(evidence: LoopEvidence, incident: WeightsThrown) -> Draft | None:
    rate = incident.rate
    watched = evidence.habits.optimizers[incident.optimizer]
    frames = stack_of(sys._getframe())
    cause = rate_given_at(frames, watched.optimizer, rate, by=evidence.construction(watched.optimizer))
    draft = check.draft(evidence, "likely")
    draft.message = f"the learning rate of {rate:.6g} is too high: updates replace the weights instead of changing them"
    draft.cause = f"{count(incident.updates, 'update')} made every layer at least {incident.growth:.3g} times as large"
    draft.at(cause or evidence.at("cause", incident.cause, f"the learning rate is {rate:.6g}"))
    draft.at(value_written_at(rate, cause, f"the value {rate:.6g} is written here"))
    draft.at(evidence.at("surfaced", incident.update, "throws the weights far away", "step"))
    draft.because(f"so in each of {count(incident.layers, 'layer')}")
    return draft.help("lower the learning rate to a hundredth or less", safety="changes-training").rated("warning")
