"""An evaluation records for a backward that never comes.

What: memory ran out in a forward pass whose result never goes backward, and most of it held activations that were saved
for backward. The model is in evaluation mode, or was trained elsewhere.

Why: `model.eval()` switches dropout and batch statistics; it does not switch gradients off. Without `torch.no_grad()`
the forward pass of an evaluation takes as much memory as that of training, often at a larger batch.

Cure: evaluate under `with torch.no_grad():` or `torch.inference_mode()`.
"""

from __future__ import annotations

from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_cures import cured
from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.memory.attempts import callers_of
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.memory.bound_for_backward import is_differentiated, source_goes_backward

CODE, NAME = "TM405", "evaluation-with-gradients"

_SHARE = 0.3  # of all tensors


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None or autopsy.in_backward or autopsy.in_optimizer or not autopsy.builds_graph:
        return None
    callers = callers_of(evidence)
    root = next((frame.module for frame in evidence.frames if frame.module is not None), None)
    if root is None or not callers or not any(each.requires_grad for each in root.parameters()):
        return None
    evaluates = not any(child.training for child in root.modules())
    saved = sum(line.nbytes for line in autopsy.saved_lines)
    if saved < _SHARE * autopsy.book.everything or saved < (autopsy.asked or 0) // 2:
        return None
    if not (evaluates or _is_trained_elsewhere(autopsy)) or is_differentiated(callers):
        return None
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"an evaluation keeps {size(saved)} for a backward that never comes",
        f"{'the model is in evaluation mode, ' if evaluates else ''}gradients are on, and no backward follows",
    )
    draft.at(callers[-1].location("cause", "gradients are on here"), *noticed(autopsy))
    shown(draft, autopsy)
    if not cured(draft, autopsy, evaluation=True):
        draft.help("run it under `with torch.no_grad():`")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _is_trained_elsewhere(autopsy: Autopsy) -> bool:
    """Whether what trains is not this, or nothing does."""
    updated = autopsy.agent is not None and autopsy.agent.clock.updates > 0
    return updated or not source_goes_backward()


RULE = Rule(CODE, NAME, check)
