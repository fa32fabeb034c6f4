"""The input and the target of a loss have different numbers of samples.

What: a classification loss takes one row of scores and one label per sample, so the first sizes of both must be equal.

Why: a `view(-1, ...)` with a wrong second size moved elements between the batch and the features, input and target were
flattened or shifted differently, or one of them belongs to another batch.

Cure: flatten and cut both in the same way; keep the batch dimension when reshaping (`x.flatten(1)`).
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.shapes._cuts import Refusal, mark_cuts, replayed_until
from torchmedic.diagnose.rules.shapes._losses import CLASSIFYING, given_to_loss
from torchmedic.diagnose.words.tensors import count, incomplete_batch, made_here, shape
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.source.spots import Spot

_LOSSES = (*CLASSIFYING, "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss")


@rule("TM156", "batch-size-mismatch")
def check(evidence: RaisedEvidence) -> Draft | None:
    if not evidence.kinds & {"RuntimeError", "ValueError"}:
        return None
    given = given_to_loss(evidence, *_LOSSES)
    if given is None or given.input.dim() < 2 or given.target.dim() < 1:
        return None
    rows, labels = int(given.input.shape[0]), int(given.target.shape[0])
    if rows == labels:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"`{given.loss}` was given {rows} rows of scores and {labels} labels"
    draft.cause = f"its input is {shape(given.input)} and its target {shape(given.target)}: the first sizes differ"
    replayed = replayed_until(evidence)
    mixed = _mixed_at(replayed, rows, labels)
    draft.mark(mixed, "cause", f"the {labels} samples become {rows} rows here")
    is_told = mixed is not None or mark_cuts(draft, evidence, replayed, given)
    draft.at(*evidence.at_user_line("surfaced" if is_told else "cause", f"{rows} rows meet {labels} labels"))
    draft.at(made_here(evidence, given.input, f"becomes {shape(given.input)}"))
    draft.at(made_here(evidence, given.target, f"becomes {shape(given.target)}"))
    batch = next((int(tensor.shape[0]) for tensor in evidence.incident.batch if tensor.dim()), None)
    if batch is not None and batch in (rows, labels):
        odd = "the target" if batch == rows else "the input of the loss"
        draft.because(f"the loader's batch has {count(batch, 'sample')}, so {odd} has the wrong size")
    short = incomplete_batch(evidence)
    if short is not None and short[1] in (rows, labels):
        draft.because(
            f"this batch has {count(short[0], 'sample')}, not {short[1]}: the loader's last batch is not full"
        )
    if mixed is not None:
        return draft.help("keep the batch dimension when reshaping, with `flatten(1)` for instance")
    return draft.help("reshape and cut input and target in the same way, so that each row keeps its label")


def _mixed_at(replayed: Refusal, rows: int, labels: int) -> Spot | None:
    """The only line of a replay of the step that makes as many rows as the scores have of as many as there are labels.

    The number of rows must change by reshaping: to pick rows, or to join tensors, may be meant.
    """
    spots = {
        call.spot
        for call in replayed.calls
        if call.name in ("view", "reshape", "flatten", "unflatten")
        and [int(tensor.shape[0]) for tensor in (*call.inputs[:1], *call.outputs) if tensor.dim()] == [labels, rows]
    }
    return spots.pop() if len(spots) == 1 else None
