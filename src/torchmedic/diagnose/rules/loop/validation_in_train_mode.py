"""The model is validated in training mode.

What: dropout stays active, so the metrics are too low and change from run to run; batch normalisation normalises with
the validation batch and also updates its running statistics with it: the validation data leaks into the model.

Why: `model.eval()` is missing. `torch.no_grad()` does not replace it: it only stops the recording of the graph.

Cure: call `model.eval()` before the validation and `model.train()` after it.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ValidationInTrainMode
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM614", "validation-in-train-mode", ValidationInTrainMode)
def check(evidence: LoopEvidence, incident: ValidationInTrainMode) -> Draft | None:
    norms, dropouts = incident.norms, incident.dropouts
    draft = check.draft(evidence, "proven" if norms else "likely")
    draft.message = "the model is validated in training mode" + (
        ": batch normalisation learns from the validation data" if norms else ": dropout is active"
    )
    draft.cause = "batches of another dataset go through the model without gradients, while it is in training mode"
    draft.at(evidence.at("cause", incident.cause, "the model is in training mode here"))
    draft.at(evidence.at("surfaced", incident.data, "data that is not trained on"))
    if norms:
        draft.because(
            f"{count(len(norms), 'layer')} of batch normalisation: {listed([f'`{name}`' for name in norms], 3)}"
        )
    if dropouts:
        draft.because(f"{count(len(dropouts), 'layer')} of dropout: {listed([f'`{name}`' for name in dropouts], 3)}")
    draft.help("call `eval()` on the model before the validation, and `train()` after it")
    return draft.rated("warning")
