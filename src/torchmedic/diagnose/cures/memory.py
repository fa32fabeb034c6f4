"""Cures for a step that ran out of memory, with the numbers that a replay on fake tensors predicts for them.

Where the prediction does not agree with the failure itself, nothing is said of it. What can be run for real, in a copy
of the process, is run when the diagnosis is made, and proven or taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from torchmedic.diagnose.rule import Draft
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.cures.forked import Proof, TrialPlan
from torchmedic.evidence.memory.cures.predicted import Prediction, Tried, predict
from torchmedic.evidence.memory.cures.real_step import OTHER_ERROR
from torchmedic.evidence.memory.fake.whole_step import Change, Rewritten
from torchmedic.records import Diagnosis, Safety, Treatment
from torchmedic.replay.step.trial import Edit, attempt, edited, treatment
from torchmedic.source.segment.cut import CannotCut

_MAX_ADVICE = 3


class Cures(NamedTuple):
    """Whether the prediction gave any advice, and what is to be tried for real once the diagnosis is made."""

    is_help: bool
    plan: TrialPlan | None


def add_cures(draft: Draft, autopsy: Autopsy | None, *, evaluation: bool = False) -> Cures:
    """Replay the step on fake tensors with each cure, and add the cures that are predicted to fit."""
    if autopsy is None:
        return Cures(False, None)
    found = predict(autopsy, evaluation=evaluation)
    if isinstance(found, str):
        return Cures(False, TrialPlan(evaluation=evaluation))
    plan = TrialPlan(unpredicted=found.unpredicted, evaluation=evaluation)
    what = "the evaluation" if evaluation else "the step"
    total = found.room.total
    draft.because(f"by a replay on fake tensors {what} as it is needs {_of(found.unchanged, total)}")
    draft.because(*(_not_enough(each, total) for each in found.tried if not each.fits))
    room = _MAX_ADVICE - draft.has_treatment
    draft.treat(*(_treatment(each, found, what) for each in found.fitting[:room]))
    if not evaluation and _is_too_large(found):
        draft.help("train fewer parameters, or shard the model over several devices: a smaller batch is not enough")
        return Cures(True, plan)
    return Cures(bool(found.fitting), plan)


def add_rewritten(draft: Draft, autopsy: Autopsy, advice: str, edit: Edit) -> TrialPlan | None:
    """Add other source for a line of the step: tried at once on a device, and else when the diagnosis is made."""
    if not autopsy.exhaustion.on_device:
        draft.help(advice, patch=edited(edit)[1])
        return TrialPlan(known=Change(rewritten=Rewritten(edit, advice)))
    try:
        tried = treatment(advice, attempt(autopsy.evidence.step_through_backward(), edit))
    except CannotCut:
        tried = None
    draft.treat(tried or Treatment(title=advice, patch=edited(edit)[1]))
    return None


def after_trials(diagnosis: Diagnosis, proofs: Sequence[Proof]) -> Diagnosis:
    """The diagnosis with what trials have shown: what has passed is proven, and what failed is no longer offered."""
    proven = [
        Treatment(title=_title(change), safety=_safety(change), proven=True, result=outcome.result, patch=outcome.patch)
        for change, outcome in proofs
        if outcome.passed
    ]
    in_vain = [(change, outcome.result) for change, outcome in proofs if outcome.passed is False]
    fewest = min((change.rows for change, _ in in_vain if change.rows is not None), default=None)
    failed = [
        f"tried: {_how(change)} {result}"
        for change, result in in_vain
        if change.rows in (None, fewest) and not (change.rows is not None and result.startswith(OTHER_ERROR))
    ]
    told = {_title(change) for change, _ in in_vain if change.cut is None} | {each.title for each in proven}
    cut = any(change.rows is not None and outcome.passed for change, outcome in proofs)
    others = [
        each
        for each in diagnosis.treatments
        if each.title not in told and not (cut and each.result)  # a prediction: the trial says it better
    ]
    return msgspec.structs.replace(
        diagnosis,
        treatments=(*proven, *others[: max(1, _MAX_ADVICE - len(proven))]),
        evidence=(*diagnosis.evidence, *failed),
    )


def _is_too_large(found: Prediction) -> bool:
    """Whether not even one row fits, by numbers that are no mere upper bounds."""
    alone = any(each.change.rows is not None and each.change.rows.kept == 1 for each in found.tried)
    return alone and not found.fitting and found.room.weigh is None


def _treatment(tried: Tried, found: Prediction, what: str) -> Treatment:
    change = tried.change
    most = "at most " if found.room.weigh is not None else ""
    result = f"{what} needs {most}{_of(tried.needed, found.room.total)}"
    return Treatment(title=_title(change), safety=_safety(change), result=result)


def _safety(change: Change) -> Safety:
    return "changes-training" if change.rows is not None or change.autocast else "edit"


def _title(change: Change) -> str:
    named = change.cut or change.rewritten
    if named is not None:
        return named.advice
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
    """The evidence of a cure that does not fit: it says how far away a cure is."""
    return f"{_how(tried.change)} it may still need {_of(tried.needed, total)}"


def _how(change: Change) -> str:
    if change.cut is not None:
        return "without these graphs"
    if change.rewritten is not None:
        return f"with `{change.rewritten.edit.text}`"
    if change.grad is not None and change.rows is None:
        return "without gradients"
    if change.rows is not None:
        return f"with {change.rows.kept} of the {change.rows.of} rows"
    if change.checkpointed:
        return f"with every `{type(change.checkpointed[0]).__name__}` checkpointed"
    return "under autocast to bfloat16"
