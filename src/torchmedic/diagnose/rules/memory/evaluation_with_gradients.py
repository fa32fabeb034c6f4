"""An evaluation records graphs for a backward that never happens.

What: memory ran out in a forward pass whose result is never used in a backward, and most of the memory held activations
that were saved for backward. The model is in evaluation mode, or was trained elsewhere.

Why: `model.eval()` changes dropout and batch statistics; it does not switch gradients off. Without `torch.no_grad()`
the forward pass of an evaluation takes as much memory as in training, often with a larger batch.

Cure: evaluate under `with torch.no_grad():` or `torch.inference_mode()`.
"""

from __future__ import annotations

from torchmedic.diagnose.cures.memory import add_cures
from torchmedic.diagnose.rule import RuleAnswer, rule
from torchmedic.diagnose.rules.memory._table import noticed, shown
from torchmedic.diagnose.words.format import size
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.wanted_graphs import evaluation_of


@rule("TM405", "evaluation-with-gradients")
def check(evidence: RaisedEvidence) -> RuleAnswer | None:
    autopsy = evidence.autopsy
    found = evaluation_of(autopsy) if autopsy is not None else None
    if autopsy is None or found is None:
        return None
    draft = check.draft(evidence, "proven")
    draft.message = f"an evaluation keeps {size(found.saved)} for a backward that never happens"
    draft.cause = (
        f"{'the model is in evaluation mode, ' if found.is_declared else ''}gradients are on, and no backward follows"
    )
    draft.at(found.call.location("cause", "gradients are on here"), *noticed(autopsy))
    kept = next((each for each in autopsy.retained if each.for_nothing and each.is_container), None)
    if kept is not None:
        draft.because(f"`{kept.holder.path}` keeps the graphs of {count(kept.tensors, 'result')}: {size(kept.nbytes)}")
    shown(draft, autopsy)
    cures = add_cures(draft, autopsy, evaluation=True)
    if not cures.is_help:
        draft.help("run it under `with torch.no_grad():`")
    return RuleAnswer(draft.done(), cures.plan)
