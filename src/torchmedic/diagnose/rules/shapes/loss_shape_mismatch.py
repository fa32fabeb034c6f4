"""The target of a classification loss has a shape that does not fit the scores.

What: scores of shape `[N, C, ...]` need labels of shape `[N, ...]`: the classes are dimension 1 of the scores, and the
labels have no such dimension. Class weights have one entry per class.

Why: labels of shape `[N, 1]`, as many datasets return them; scores with the classes last (`[N, T, C]`, as sequence
models return them); masks whose size differs from the scores; weights for a different number of classes.

Cure: `squeeze(1)` the labels; `transpose(1, 2)` or flatten the scores; bring both to the same size.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._cuts import mark_cuts, replayed_until
from torchmedic.diagnose.rules.shapes._losses import CLASSIFYING, Given, given_to_loss
from torchmedic.diagnose.words.tensors import made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.records import Role


@rule("TM164", "loss-shape-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError"}:
        return None
    given = given_to_loss(evidence, *CLASSIFYING)
    if given is None or given.input.dim() == 0:
        return None
    classes = int(given.input.shape[0 if given.input.dim() == 1 else 1])
    if given.weight is not None and given.weight.numel() != classes:
        return _weights(evidence, given, classes)
    scores, labels = list(given.input.shape), list(given.target.shape)
    if labels in (given.expected_target, scores) or (labels and len(scores) > 1 and labels[0] != scores[0]):
        return None
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"`{given.loss}` was given a target of {shape(given.target)}; scores of {scores} take {given.expected_target}"
    )
    draft.cause = f"dimension {min(len(scores) - 1, 1)} of the scores, with {classes}, is read as the classes"
    is_told = len(labels) == len(scores) - 1 and mark_cuts(draft, evidence, replayed_until(evidence), given)
    role: Role = "surfaced" if is_told else "cause"
    draft.at(*evidence.at_user_line(role, f"target {shape(given.target)}, not {given.expected_target}"))
    draft.at(made_here(evidence, given.target, f"becomes {shape(given.target)}"))
    draft.at(made_here(evidence, given.input, f"becomes {scores}"))
    if len(scores) > 2 and labels == scores[:-1]:
        draft.because(f"the target fits scores whose classes stand last: {scores[-1]} classes, not {classes}")
        order = [0, len(scores) - 1, *range(1, len(scores) - 1)]
        turn = "transpose(1, 2)" if len(scores) == 3 else f"permute({', '.join(map(str, order))})"
        draft.help(
            f"move the classes to dimension 1 with `.{turn}`, or flatten both: `view(-1, {scores[-1]})` and `view(-1)`"
        )
    elif len(labels) > 1 and [*labels[:1], *labels[2:]] == given.expected_target and labels[1] == 1:
        draft.help("drop dimension 1 of the target: `.squeeze(1)`")
    elif len(labels) == len(scores) and labels[1:2] != scores[1:2]:
        draft.help("pass class indices without the dimension of classes, or one probability for each class")
    else:
        draft.help("bring target and scores to one size")
    return draft


def _weights(evidence: RaisedEvidence, given: Given, classes: int) -> Draft:
    assert given.weight is not None
    have = given.weight.numel()
    draft = check.draft(evidence, "proven")
    draft.message = f"`{given.loss}` was given {have} class weights for {classes} classes"
    draft.cause = f"the scores are {shape(given.input)}, the weights {shape(given.weight)}"
    draft.at(*evidence.at_user_line("cause", f"{have} weights meet {classes} classes"))
    draft.at(made_here(evidence, given.input, f"becomes {shape(given.input)}"))
    return draft.help(f"give one weight for each of the {classes} classes")
