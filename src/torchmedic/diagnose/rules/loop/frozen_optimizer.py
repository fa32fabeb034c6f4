"""All parameters of the optimizer are frozen: the weights never change.

What: `requires_grad` is off for all parameters of the optimizer. They get no gradient, and `step()` does nothing. Or
other parameters are trained, and layers are frozen that can never do anything that way: a whole model with random
values, or the zero matrix of an adapter such as LoRA.

Why: the parameters were frozen after, or before, they were given to the optimizer, and the trainable parameters were
not given to any optimizer. Or a network of several, as the discriminator of a GAN, was frozen for the step of another
one, and not thawed for its own step. Or a choice by name (`"lora" in name`) names too few or too many.

Cure: freeze the parameters that should not change, and give the optimizer the others.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import FrozenLayers, FrozenOptimizer
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@rule("TM609", "frozen-optimizer")
def check(evidence: LoopEvidence) -> Draft | None:
    match evidence.incident:
        case FrozenOptimizer() as incident:
            return _optimizer(evidence, incident)
        case FrozenLayers() as layers:
            return _layers(evidence, layers)
    return None


def _layers(evidence: LoopEvidence, incident: FrozenLayers) -> Draft:
    many = count(len(incident.names), "weight tensor")
    draft = check.draft(evidence, "likely")
    if incident.is_zero:
        draft.message = f"{many} of the model can never do anything: all values are zero, and frozen"
        draft.cause = "a product with a matrix of zeros is zero, and no update changes a frozen matrix"
    else:
        draft.message = "the model does not learn: all its weights are frozen at their random initial values"
        draft.cause = "the optimizer holds all parameters of this model, and requires_grad is off for every one of them"
    draft.at(
        evidence.at("cause", incident.cause, "parameters are frozen here"),
        evidence.at("origin", incident.built, "other parameters are trained by this optimizer"),
    )
    draft.because(
        f"unchanged in {count(incident.updates, 'update')}: {listed([f'`{name}`' for name in incident.names])}",
        "no line of the script sets requires_grad to True",
    )
    draft.help("leave the parameters that are to learn out of what is frozen", safety="changes-training")
    return draft.rated("warning")


def _optimizer(evidence: LoopEvidence, incident: FrozenOptimizer) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"the weights do not change: all {count(incident.held, 'parameter')} of the optimizer are frozen"
    draft.cause = "requires_grad is off for every parameter that an optimizer holds, so that no update has a gradient"
    label = "requires_grad is False for all of them" if incident.built is None else "parameters are frozen here"
    draft.at(evidence.at("cause", incident.cause, label), evidence.at("origin", incident.built, "this optimizer"))
    draft.at(evidence.at("surfaced", incident.update, "finds no gradient", "step"))
    if incident.built is not None:
        draft.because(
            f"the last {count(incident.updates, 'update')} of this optimizer had no gradient to apply",
            "no line of the script sets requires_grad to True",
        )
        return draft.help("set `requires_grad` to True before these parameters are to learn", safety="changes-training")
    draft.because(
        f"{count(incident.updates, 'update')} had no gradient to apply",
        f"the loss reaches {count(incident.reached, 'parameter')} that no optimizer has "
        f"({count(incident.elements, 'weight')})",
    )
    return draft.help("give the optimizer the parameters that should be trained", safety="changes-training")
