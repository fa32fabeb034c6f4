"""Layers in a plain list or dict are not registered in the model, so no optimizer trains them.

What: `self.layers = [nn.Linear(...), ...]` hides the layers from `parameters()`, `state_dict()`, `to()` and `train()`.
They take part in the forward pass and get gradients, but no optimizer has them, so they keep their initial weights, and
they are not saved. The same goes for `self.scale = torch.ones(1, requires_grad=True)`.

Why: a module registers only attributes that are modules or parameters; a Python list or a plain tensor is neither.

Cure: use `nn.ModuleList` for a list, `nn.ModuleDict` for a dict, `nn.ParameterList` for parameters, and
`nn.Parameter(...)` for a tensor.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import UnregisteredLayers
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.origins import attribute_assignments
from torchmedic.source.user_code import is_user_file


@loop_rule("TM607", "unregistered-layers", UnregisteredLayers)
def check(evidence: LoopEvidence, incident: UnregisteredLayers) -> Draft | None:
    name, kind = incident.name, incident.kind
    path = ".".join(filter(None, (incident.path, name)))
    draft = check.draft(evidence, "proven")
    if kind == "tensor":
        return _plain(evidence, incident, draft, path)
    draft.message = (
        f"{count(incident.elements, 'weight')} in the {kind} `{path}` are not trained: they are not parameters "
        "of the model"
    )
    draft.cause = (
        f"`{path}` is a plain {kind}, so `parameters()` does not list what is in it, and no optimizer has got it"
    )
    draft.at(_assigned(evidence, incident, f"a plain {kind} of {incident.layers} does not register them"))
    draft.at(evidence.at("surfaced", incident.cause, "leaves them as they are", "step"))
    draft.because(
        f"the loss reaches {count(incident.tensors, 'tensor')} there, which no update has changed; all other "
        "parameters that it reaches are in an optimizer",
        "they are missing from state_dict() too, and .to(device) does not move them",
    )
    wrapper = {"dict": "nn.ModuleDict"}.get(kind, "nn.ModuleList")
    if not incident.holds_modules:
        wrapper = {"dict": "nn.ParameterDict"}.get(kind, "nn.ParameterList")
    return draft.help(f"put them into `{wrapper}(...)`", safety="changes-training")


def _plain(evidence: LoopEvidence, incident: UnregisteredLayers, draft: Draft, path: str) -> Draft:
    draft.message = f"`{path}` is not trained: it is a plain tensor, not a parameter of the model"
    draft.cause = f"`parameters()` does not list the tensor `{path}`, so no optimizer has got it"
    draft.at(_assigned(evidence, incident, "a plain tensor is not registered"))
    draft.at(evidence.at("surfaced", incident.cause, "leaves it as it is", "step"))
    draft.because(
        "it has `requires_grad=True` and the loss reaches it, and no update has changed it",
        "it is missing from state_dict() too, and .to(device) does not move it",
    )
    return draft.help(f"make it a parameter: `self.{incident.name} = nn.Parameter(...)`", safety="changes-training")


def _assigned(evidence: LoopEvidence, incident: UnregisteredLayers, label: str) -> Location | None:
    """Where the attribute is assigned in the class that holds it."""
    for file, statement in attribute_assignments(incident.module, incident.name):
        if is_user_file(file):
            return node_location("cause", file, statement, label)
    return evidence.at("cause", incident.cause, label)
