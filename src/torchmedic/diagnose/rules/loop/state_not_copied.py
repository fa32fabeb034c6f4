"""The weights that were kept for later are the model's own tensors, so loading them restores nothing.

What: each tensor of the state that was loaded has the memory of the model's own tensor. The load copied every tensor
onto itself.

Why: `state_dict()` does not copy. It returns the tensors of the model, and each update changes them in place. So the
"best" weights are those of the last update, and a reset to the first weights keeps what was learned. `dict(...)` and
`.copy()` make another dictionary with the same tensors. `target = model` makes no second model either: a target network
that is the trained one changes with each update. No error is raised.

Cure: keep a copy: `copy.deepcopy(model.state_dict())`, or save the state to a file. A second model is
`copy.deepcopy(model)`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import StateNotCopied
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM661", "state-not-copied", StateNotCopied)
def check(evidence: LoopEvidence, incident: StateNotCopied) -> Draft | None:
    draft = check.draft(evidence, "proven")
    draft.message = "the state that is loaded is the model's own, so nothing is restored"
    draft.cause = "`state_dict()` returns the tensors of the model itself, and each update changes them"
    loading = incident.loading
    if incident.is_one_module:
        draft.message = "a model is given its own weights: two variables hold the same model"
        draft.cause = "an assignment makes another name for a model, and no second model, so both change together"
        draft.at(evidence.at("cause", incident.cause, "no copy"))
        draft.at(evidence.at("surfaced", loading, "copies each tensor onto itself", "load_state_dict"))
        draft.because(f"{count(incident.tensors, 'tensor')} of the state, each with the memory of the model's own")
        draft.help("make a second model with `copy.deepcopy(...)`", safety="changes-training")
        return draft.rated("warning")
    if incident.cause == loading:
        draft.at(evidence.at("cause", loading, "copies each tensor onto itself", "load_state_dict"))
    else:
        draft.at(evidence.at("cause", incident.cause, "keeps the tensors themselves, not a copy", "state_dict"))
        draft.at(evidence.at("surfaced", loading, "copies each tensor onto itself", "load_state_dict"))
    draft.because(f"{count(incident.tensors, 'tensor')} of the state, each with the memory of the model's own")
    model = evidence.receiver(incident.cause, "state_dict") or "model"
    draft.help(f"keep a copy: `copy.deepcopy({model}.state_dict())`", safety="changes-training")
    return draft.rated("warning")
