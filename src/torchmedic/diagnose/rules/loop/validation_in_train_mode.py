"""A model is validated, or gives the targets of another one, in training mode.

What: dropout stays active, so the metrics are too low and change from run to run; batch normalisation normalises with
the validation batch and also updates its running statistics with it: the validation data leaks into the model. A
teacher with dropout gives another answer to the same question each time.

Why: `model.eval()` is missing. `torch.no_grad()` does not replace it: it only stops the recording of the graph.

Cure: call `model.eval()` before the validation and `model.train()` after it.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ValidationInTrainMode
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.spots import Place


@loop_rule("TM614", "validation-in-train-mode", ValidationInTrainMode)
def check(evidence: LoopEvidence, incident: ValidationInTrainMode) -> Draft | None:
    norms = incident.norms
    if incident.forward is not None:
        return _of_teacher(evidence, incident, incident.forward)
    draft = check.draft(evidence, "proven" if norms else "likely")
    draft.message = "the model is validated in training mode" + (
        ": batch normalisation learns from the validation data" if norms else ": dropout is active"
    )
    draft.cause = "batches of another dataset go through the model without gradients, while it is in training mode"
    draft.at(evidence.at("cause", incident.cause, "the model is in training mode here"))
    draft.at(evidence.at("surfaced", incident.data, "data that is not trained on"))
    _name_layers(draft, incident)
    draft.help("call `eval()` on the model before the validation, and `train()` after it")
    return draft.rated("warning")


def _of_teacher(evidence: LoopEvidence, incident: ValidationInTrainMode, forward: Place) -> Draft:
    """The results of a trained model are what another model learns from."""
    draft = check.draft(evidence, "likely")
    draft.message = "a model that is not trained any more gives its results in training mode"
    draft.cause = "another model learns from results that depend on chance, or on the other examples of the batch"
    draft.at(evidence.at("cause", incident.cause, "the model is in training mode here"))
    if forward != incident.cause:
        draft.at(evidence.at("surfaced", forward, "is called without gradients in each step"))
    draft.because("the weights of this model stay as they are while another model is trained")
    _name_layers(draft, incident)
    draft.help("call `eval()` on the model before it is used", safety="changes-training")
    return draft.rated("warning")


def _name_layers(draft: Draft, incident: ValidationInTrainMode) -> None:
    norms, dropouts = incident.norms, incident.dropouts
    if norms:
        draft.because(
            f"{count(len(norms), 'layer')} of batch normalisation: {listed([f'`{name}`' for name in norms], 3)}"
        )
    if dropouts:
        draft.because(f"{count(len(dropouts), 'layer')} of dropout: {listed([f'`{name}`' for name in dropouts], 3)}")
