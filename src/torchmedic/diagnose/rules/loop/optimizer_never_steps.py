"""Gradients are computed and cleared again and again, and the optimizer never steps.

What: `backward()` ran in many rounds of the loop, the gradients were cleared each time, and `optimizer.step()` was
never called.

Why: the call is missing, stands in a branch that is never taken, or lacks its parentheses: `optimizer.step` names the
method and does not call it. Or there are two optimizers, as for a GAN, and the wrong one is called. The weights keep
their initial values. No error is raised.

Cure: call `optimizer.step()` after `backward()` and before the gradients are cleared.
"""

from __future__ import annotations

import ast

from torchmedic.detect.loop.incident import OptimizerNeverSteps
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.spots import Place
from torchmedic.source.syntax import has_line, nodes_in, syntax_tree


@loop_rule("TM627", "optimizer-never-steps", OptimizerNeverSteps)
def check(evidence: LoopEvidence, incident: OptimizerNeverSteps) -> Draft | None:
    draft = check.draft(evidence, "proven" if incident.is_named else "likely")
    draft.message = "the weights never change: the optimizer never steps"
    draft.cause, label = "`step()` of the optimizer is not called", "no `step()` follows"
    if incident.is_named:
        draft.cause, label = "this line names `step` and does not call it", "the parentheses are missing"
    elif incident.is_skipped:
        draft.cause, label = "`step()` stands behind a condition, and was never reached", "no update follows"
    elif incident.steps_other:
        draft.cause, label = "another optimizer steps where the turn of this one is", "steps the other optimizer"
    watched = evidence.habits.optimizers.get(incident.optimizer)
    name = _name(watched.built) if watched is not None and len(evidence.habits.optimizers) > 1 else ""
    if name:
        draft.message = f"the weights of `{name}` never change: this optimizer never steps"
    draft.at(
        evidence.at("cause", incident.cause, label),
        evidence.at("origin", watched.built if watched is not None else None, "this optimizer"),
    )
    draft.because(
        f"backward ran {count(incident.backwards, 'time')}, gradients were cleared {count(incident.cleared, 'time')}, "
        "and there was no update",
        "nothing else has written to the sampled weights",
    )
    if incident.is_skipped:
        draft.help(
            "let the condition hold whenever an accumulation is complete, and at least once per epoch",
            safety="changes-training",
        )
        return draft.rated("error")
    draft.help("call `step()` of the optimizer after `backward()`", safety="changes-training")
    return draft.rated("error")


def _name(built: Place | None) -> str:
    """What the line that built an optimizer assigns it to; empty where it cannot be told."""
    if built is None:
        return ""
    nodes = nodes_in(syntax_tree(built.file))
    targets = [each.targets for each in nodes if isinstance(each, ast.Assign) and has_line(each, built.line)]
    target = targets[0][0] if len(targets) == 1 and len(targets[0]) == 1 else None
    return ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""
