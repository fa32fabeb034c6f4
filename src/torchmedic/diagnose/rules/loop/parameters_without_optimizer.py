"""A part of the model gets gradients in every step, and no optimizer has its parameters.

What: backward computes gradients for these layers, and no update uses them. The layers keep the random values of their
constructor, while an optimizer trains other layers of the same model. The same goes for parameters of a loss, such as
class centres or a temperature.

Why: the optimizer was given the parameters of some modules only, as `model.base.parameters()` or
`encoder.parameters()`, and the heads, the decoder or the loss were forgotten. The loss falls a little, since the other
layers adapt to the random ones, and no error is raised.

Cure: give the optimizer all parameters: `model.parameters()`, or `[*encoder.parameters(), *decoder.parameters()]`. If
the layers shall stay random, freeze them with `requires_grad_(False)`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ParametersWithoutOptimizer
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM623", "parameters-without-optimizer", ParametersWithoutOptimizer)
def check(evidence: LoopEvidence, incident: ParametersWithoutOptimizer) -> Draft | None:
    names = listed([f"`{name}`" for name in incident.names])
    draft = check.draft(evidence, "likely")
    draft.message = f"no optimizer has {names}" if incident.are_bare else f"no optimizer has the parameters of {names}"
    draft.cause = (
        "the optimizer was given other parts of the model only"
        if incident.twin is None
        else "two optimizers were given the same parameters"
    )
    if incident.is_thawed:
        draft.message = f"{names} are not trained: no optimizer has the parameters that were thawed"
        draft.cause = "they were frozen at first, and the optimizer has only what was trained then"
    draft.at(
        evidence.at("cause", incident.cause, "leaves them out"),
        evidence.at("origin", incident.twin, "has the same parameters"),
        evidence.at("origin", incident.signed, f"`{incident.sign}`: they are meant to be trained"),
        evidence.at("surfaced", incident.update, "leaves them as they are", "step"),
    )
    draft.because(
        f"the loss reaches {count(incident.elements, 'weight')} there, and {count(incident.updates, 'update')} changed "
        + ("none of them" if incident.is_thawed else "none of them: they still have their first values"),
        ""
        if incident.sign or incident.twin or incident.is_thawed
        else "the optimizer has the biases of the same layers, and not one weight"
        if incident.has_biases
        else "the step combines them with the result of layers that an optimizer has"
        if incident.are_bare
        else "gradients pass through them from the loss to layers of the same model that an optimizer has",
    )
    return draft.help(
        "give the optimizer their parameters too, or freeze them with `requires_grad_(False)`",
        safety="changes-training",
    )
