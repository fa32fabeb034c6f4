"""After the first validation the model is trained in evaluation mode.

What: `model.eval()` switches dropout off and makes batch normalisation use its running statistics, which are then no
longer updated. Nothing switches back, so all training after the first validation runs in this mode.

Why: `model.train()` is called once before the loop, or not at all, but not after each validation.

Cure: call `model.train()` at the start of each epoch, or at the end of the validation.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import TrainingInEvalMode
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM613", "training-in-eval-mode", TrainingInEvalMode)
def check(evidence: LoopEvidence, incident: TrainingInEvalMode) -> Draft | None:
    if incident.before:
        message = "the model is trained in evaluation mode since the first validation"
        cause = "eval() was called for the validation, and train() was not called after it"
    else:
        message = "the model is trained in evaluation mode, and was never in training mode"
        cause = "eval() was called before the first update, and train() was not called after it"
    draft = check.draft(evidence, "proven" if incident.before else "likely", message, cause)
    draft.at(
        evidence.at("cause", incident.cause, "from here on the model stays in evaluation mode", "eval"),
        evidence.at("surfaced", incident.forward, "a training step, in evaluation mode"),
    )
    draft.because(
        f"until update {incident.before} it was in training mode, in the {incident.since} since then it was not"
        if incident.before
        else f"{incident.since} updates were looked at: all were made in evaluation mode, and the statistics of the "
        "normalisation are those of the constructor",
        f"off while it is trained: {_parts(incident.norms, 'batch normalisation')}" if incident.norms else "",
        f"off while it is trained: {_parts(incident.dropouts, 'dropout')}" if incident.dropouts else "",
    )
    name = evidence.receiver(incident.cause, "eval") or "model"
    when = "when the validation is over" if incident.before else "before the first update"
    return draft.help(f"call `{name}.train()` {when}", safety="changes-training")


def _parts(names: list[str], what: str) -> str:
    return f"{count(len(names), f'{what} layer')} ({listed([f'`{name}`' for name in names], 3)})"
