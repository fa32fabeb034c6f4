"""Cures for a step that ran out of memory, with the numbers that a replay on fake tensors predicts for them.

None of them is proven: nothing was run. Where the prediction does not agree with the failure itself, nothing is said.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.records import Treatment
from torchmedic.replay.memory.autopsy import Autopsy
from torchmedic.replay.memory.trials import Prediction, Tried, predict

_MOST = 3  # pieces of advice


def cured(draft: Draft, autopsy: Autopsy, *, evaluation: bool = False) -> bool:
    """Add the cures that are predicted to fit; whether there is anything to say."""
    found = predict(autopsy, evaluation=evaluation)
    if isinstance(found, str):
        return False
    what = "the evaluation" if evaluation else "the step"
    total = found.room.total
    draft.because(f"by a replay on fake tensors {what} as it is needs {_of(found.unchanged, total)}")
    draft.because(*(_not_enough(each, total) for each in found.tried if not each.fits))
    room = _MOST - draft.has_treatment
    draft.treat(*(_treatment(each, found, what) for each in found.fitting[:room]))
    if not evaluation and _is_too_large(found):
        draft.help("train fewer parameters, or shard the model over several devices: a smaller batch is not enough")
        return True
    return bool(found.fitting)


def _is_too_large(found: Prediction) -> bool:
    """Whether not even one row fits, by numbers that are no mere upper bounds."""
    alone = any(each.change.rows is not None and each.change.rows.kept == 1 for each in found.tried)
    return alone and not found.fitting and found.room.weigh is None


def _treatment(tried: Tried, found: Prediction, what: str) -> Treatment:
    change = tried.change
    most = "at most " if found.room.weigh is not None else ""
    result = f"{what} needs {most}{_of(tried.needed, found.room.total)}"
    changes = change.rows is not None or change.autocast
    return Treatment(title=_title(tried), safety="changes-training" if changes else "edit", result=result)


def _title(tried: Tried) -> str:
    change = tried.change
    if change.grad is not None:
        fewer = f", with a batch of {change.rows.kept} instead of {change.rows.of}" if change.rows is not None else ""
        return f"run it under `with torch.no_grad():`{fewer}"
    if change.rows is not None:
        kept, of = change.rows
        times = -(-of // kept)
        return f"use a batch of {kept} instead of {of}, and accumulate gradients over {times} of them"
    if change.checkpointed:
        kind = type(change.checkpointed[0]).__name__
        return f"checkpoint every `{kind}` in forward (`torch.utils.checkpoint.checkpoint`, `use_reentrant=False`)"
    return f'run the forward pass and the loss under `torch.autocast("{change.autocast}", dtype=torch.bfloat16)`'


def _of(needed: int, total: int) -> str:
    """Two sizes that are compared, to the same decimal."""
    unit, power = ("GiB", 30) if total >= 1 << 30 else ("MiB", 20)
    return f"{needed / (1 << power):.2f} of the {total / (1 << power):.2f} {unit} there are"


def _not_enough(tried: Tried, total: int) -> str:
    """What was tried in vain says how far away a cure is."""
    change = tried.change
    if change.grad is not None and change.rows is None:
        how = "without gradients"
    elif change.rows is not None:
        how = f"with {change.rows.kept} of the {change.rows.of} rows"
    elif change.checkpointed:
        how = f"with every `{type(change.checkpointed[0]).__name__}` checkpointed"
    else:
        how = "under autocast to bfloat16"
    return f"{how} it may still need {_of(tried.needed, total)}"
