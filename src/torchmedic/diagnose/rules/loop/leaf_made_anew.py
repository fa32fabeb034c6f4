"""Each step makes a new tensor that requires a gradient, so the tensor in the optimizer never gets one.

What: the loss is computed from tensors that were made in the same step, as by `torch.tensor(x.item(),
requires_grad=True)`. Their gradients are computed and dropped. The tensors of the optimizer get no gradient, so
`step()` changes nothing.

Why: `item()`, `numpy()`, `detach()` and `torch.tensor(...)` take the number out of the graph, and `requires_grad=True`
makes backward run without an error, but it starts a new graph there. Or the forward pass makes a layer or a parameter,
as `nn.Linear(8, 2)(x)`: each step has other random weights, and the optimizer has none of them.

Cure: compute with the tensor of the optimizer itself, in torch's operations, without `item()` and without a new tensor.
Make layers and parameters once, in `__init__`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import LayerMadeAnew, LeafMadeAnew
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@rule("TM624", "leaf-made-anew")
def check(evidence: LoopEvidence) -> Draft | None:
    incident = evidence.incident
    if isinstance(incident, LayerMadeAnew):
        return _layer(evidence, incident)
    return _leaf(evidence, incident) if isinstance(incident, LeafMadeAnew) else None


def _layer(evidence: LoopEvidence, incident: LayerMadeAnew) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"`{incident.what}` is made anew in each forward pass, so it is never trained"
    draft.cause = "each step makes other parameters, and no optimizer has them"
    draft.at(evidence.at("cause", incident.cause, "makes new parameters in each step"))
    draft.at(evidence.at("surfaced", incident.update, "changes other parameters only", "step"))
    draft.because("the loss reaches parameters that are in no optimizer and are gone after the step")
    return draft.help("make it once, in `__init__`, and use it in the forward pass", safety="changes-training")


def _leaf(evidence: LoopEvidence, incident: LeafMadeAnew) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"`step()` changes nothing: {_held(incident.held)} of the optimizer never got a gradient"
    draft.cause = "the loss is computed from new tensors in each step, which are not those of the optimizer"
    if incident.built is None:
        draft.at(evidence.at("cause", incident.cause, "no loss is computed from these tensors"))
    else:
        draft.at(evidence.at("cause", incident.cause, "a new tensor in each step: the graph begins here"))
        draft.at(evidence.at("origin", incident.built, "has other tensors"))
    draft.at(evidence.at("surfaced", incident.update, "finds no gradient", "step"))
    draft.because(f"{count(incident.updates, 'update')} had no gradient to apply")
    draft.because("no tensor that a loss was computed from was in the optimizer, or was there in an earlier step")
    return draft.help(
        "compute the loss from the tensors of the optimizer, without `item()`, `numpy()` or a new tensor in between",
        safety="changes-training",
    )


def _held(number: int) -> str:
    return "the tensor" if number == 1 else f"the {number} tensors"
