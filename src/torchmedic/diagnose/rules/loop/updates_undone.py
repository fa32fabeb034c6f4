"""What an update changes is undone before the next update, so the weights never get anywhere.

What: between two updates, a line sets the weights to other values: to new random values, or to an average in which the
last update counts next to nothing. Or a target network is copied into the trained model, and not the other way round.
Or weight decay takes so much of each weight in every update that nothing is left of an update after a few others.

Why: the weights are initialised in the function that trains one batch. The averaged weights of an evaluation are copied
into the model and not replaced by its own afterwards, or the average is written to the model instead of the copy that
is to follow it. Or the weight decay is as large as a learning rate, or larger.

Cure: initialise the weights once, before the loop, and put the model's own weights back after an evaluation.
Lower the weight decay; 0.0001 to 0.1 is usual.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import UpdatesUndone
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.lookup.named_numbers import DECAY, set_and_used


@loop_rule("TM629", "updates-undone", UpdatesUndone)
def check(evidence: LoopEvidence, incident: UpdatesUndone) -> Draft | None:
    if incident.set_back:
        return _set_back(evidence, incident)
    return _decay(evidence, incident) if incident.decay else _overwritten(evidence, incident)


def _overwritten(evidence: LoopEvidence, incident: UpdatesUndone) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "the model does not learn: its weights are overwritten after every update"
    is_known = incident.cause != incident.update
    if incident.is_new:
        draft.cause = "before each update the matrices have values without any likeness to those of the update before"
    else:
        draft.cause = (
            f"of what an update changes, at most {max(incident.kept, 0.001):.1%} is left when the next update begins"
        )
    label = "writes to the weights in each step" if is_known else "after this line the weights are written to"
    draft.at(evidence.at("cause", incident.cause, label, *(() if is_known else ("step",))))
    if is_known:
        draft.at(evidence.at("surfaced", incident.update, "is undone", "step"))
    draft.because(
        f"the weights were written to after each of the last {count(incident.updates, 'update')}",
        "all matrices of the optimizer were compared before an update, after it, and before the next one",
    )
    if not incident.is_new:
        draft.help("where an average is to follow the model, write the new average to the copy, and not to the model")
    draft.help("initialise or replace the weights once, before the loop, and not in each step")
    return draft.rated("warning")


def _set_back(evidence: LoopEvidence, incident: UpdatesUndone) -> Draft:
    draft = check.draft(evidence, "likely")
    draft.message = "the model does not learn: it is set back to the weights of a model that never changes"
    draft.cause = (
        f"the same weights were loaded into the trained model {incident.set_back} times, and each time its updates "
        "were lost"
    )
    draft.at(evidence.at("cause", incident.cause, "sets the trained model back", "load_state_dict"))
    draft.at(evidence.at("surfaced", incident.update, "is undone", "step"))
    draft.because(
        "the model that is copied takes part in the steps, no optimizer has its weights, and nothing wrote to them",
        "the optimizer of the trained model kept its moving averages all the while",
    )
    draft.help(
        "copy the other way round, from the trained model into the copy: `copy.load_state_dict(model.state_dict())`"
    )
    return draft.rated("warning")


def _decay(evidence: LoopEvidence, incident: UpdatesUndone) -> Draft:
    draft = check.draft(evidence, "likely")
    taken = 1 - incident.kept
    draft.message = f"the weight decay is too large: each update takes {taken:.0%} of every weight away"
    draft.cause = f"with weight_decay={incident.decay:g} and a learning rate of {incident.rate:g}, updates do not last"
    cause = evidence.at("cause", incident.cause, f"weight_decay={incident.decay:g}")
    draft.at(*set_and_used(incident.decay, cause, "the weight decay", DECAY))
    draft.at(evidence.at("surfaced", incident.update, "shrinks the weights", "step"))
    draft.because(f"after 20 more updates, {incident.kept**20:.1%} of an update is left")
    draft.help("lower the weight decay: 0.0001 to 0.1 is usual", safety="changes-training")
    return draft.rated("warning")
