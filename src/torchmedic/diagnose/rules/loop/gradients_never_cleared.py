"""The gradients are never cleared: every update applies the sum of all gradients since training began.

What: `backward()` adds to `.grad`. Nothing clears the gradients between two updates, so each step uses the gradients of
all earlier batches again, which belong to old weights.

Why: the call of `zero_grad()` is missing, stands outside of the loop of the updates (as once per epoch), or is made on
another optimizer or model than the one that is trained. In a closure, as of LBFGS, it belongs before `backward()`.

Cure: call `optimizer.zero_grad()` once per update, right after `optimizer.step()` or before the next forward pass. With
accumulation over several micro-batches, call it once per update too, not once per micro-batch. Where the weights are
updated by hand, set `weight.grad = None` after the update.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from torchmedic.detect.loop.incident import GradientsNeverCleared
from torchmedic.diagnose.cures.edits import line_added_after, line_added_before
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.replay.trace.values import number
from torchmedic.source.live_frames import place
from torchmedic.source.syntax import calls_in, has_line, nodes_in, syntax_tree
from torchmedic.source.user_variables import user_trees

_CLEARING = "optimizer_zero_grad"  # of a LightningModule


@loop_rule("TM601", "gradients-never-cleared", GradientsNeverCleared)
def check(evidence: LoopEvidence, incident: GradientsNeverCleared) -> Draft | None:
    name = evidence.optimizer_name(incident.cause) or "optimizer"
    before, after = incident.norms
    draft = check.draft(evidence, "proven")
    draft.message = f"gradients are never cleared: every update uses those of all {incident.updates} steps so far"
    draft.cause = "backward adds to the gradients, and nothing has cleared them between the updates"
    if incident.cleared is not None:
        draft.message = (
            f"gradients are not cleared between updates: the last {incident.updates} updates used old ones again"
        )
    _place(evidence, incident, draft)
    draft.because(
        f"before backward, where it should be 0, the norm of one gradient went from {number(before)} to "
        f"{number(after)} in the last steps",
        "the same gradient tensor has been in place at every update, and only backward has written to it",
    )
    if (override := _empty_override()) is not None:
        return draft.help(f"call `optimizer.zero_grad()` in `{override.name}`", safety="changes-training")
    if incident.is_by_hand:
        return draft.help(
            "clear the gradient of each weight after the update: `.grad = None`", safety="changes-training"
        )
    if incident.in_closure:
        added = line_added_before(incident.backward, f"{name}.zero_grad()")
        return draft.help(f"clear them in the closure: `{name}.zero_grad()`", patch=added, safety="changes-training")
    return draft.help(
        f"clear them after the update: `{name}.zero_grad()`",
        patch=line_added_after(incident.cause, f"{name}.zero_grad()"),
        safety="changes-training",
    )


def _place(evidence: LoopEvidence, incident: GradientsNeverCleared, draft: Draft) -> None:
    """Name the line to change: a call of `zero_grad` in the wrong place, backward in a closure, or the update."""
    stay = "the gradients it has used stay, and the next ones are added"
    if (override := _empty_override()) is not None:
        surfaced = evidence.at("surfaced", incident.backward, "adds to the gradients of all earlier calls", "backward")
        draft.at(place("cause", override.file, override.line, "is called to clear them, and does not"), surfaced)
        return
    if incident.in_closure:
        draft.at(
            evidence.at("cause", incident.backward, "adds to the gradients of all earlier calls", "backward"),
            evidence.at("surfaced", incident.cause, "calls this closure for every update", "step"),
        )
        return
    update = evidence.at("surfaced" if _is_misplaced(incident) else "cause", incident.cause, stay, "step")
    clears = "is not called between the updates"
    draft.at(
        evidence.at("cause", incident.cleared, clears, "zero_grad") if _is_misplaced(incident) else None,
        update,
        evidence.at("surfaced", incident.backward, "adds to what is there", "backward"),
    )


class _Override(NamedTuple):
    name: str
    file: str
    line: int


def _empty_override() -> _Override | None:
    """A method of the user's that a framework calls to clear gradients, and that clears none."""
    for file, tree in user_trees():
        for node in nodes_in(tree):
            if isinstance(node, ast.FunctionDef) and node.name == _CLEARING and not list(calls_in(node, "zero_grad")):
                return _Override(node.name, file, node.lineno)
    return None


def _is_misplaced(incident: GradientsNeverCleared) -> bool:
    """Whether the only call that clears the gradients stands outside of the loop of the updates.

    A framework clears them when training begins, and the user's line is then the one that starts it.
    """
    cleared = incident.cleared
    if cleared is None or incident.accumulates:
        return False
    return any(has_line(call, cleared.line) for call in calls_in(syntax_tree(cleared.file), "zero_grad"))
