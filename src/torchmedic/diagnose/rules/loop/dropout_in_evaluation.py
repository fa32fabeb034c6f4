"""Dropout is active although the model is in evaluation mode.

What: `F.dropout(x, p)` and `scaled_dot_product_attention(..., dropout_p=p)` do not know the mode of the model. Unless
the mode is passed to them, they also drop values in validation and inference: the metrics are worse than necessary and
differ from call to call.

Why: `model.eval()` changes layers such as `nn.Dropout`, not functions.

Cure: use `F.dropout(x, p, training=self.training)`, `dropout_p=p if self.training else 0.0`, or `nn.Dropout`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import DropoutInEvaluation
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM622", "dropout-in-evaluation", DropoutInEvaluation)
def check(evidence: LoopEvidence, incident: DropoutInEvaluation) -> Draft | None:
    name, share = incident.name, incident.share
    draft = check.draft(evidence, "proven")
    draft.message = f"{name} drops {share:.0%} of the values in evaluation mode too"
    draft.cause = "the mode was not passed to it, and `model.eval()` has no effect on functions"
    draft.at(evidence.at("cause", incident.cause, "was called by a model in evaluation mode, without gradients", name))
    told = "training=self.training" if "attention" not in name else "dropout_p=p if self.training else 0.0"
    draft.help(f"pass the mode: `{told}`", safety="changes-training")
    return draft.rated("warning")
