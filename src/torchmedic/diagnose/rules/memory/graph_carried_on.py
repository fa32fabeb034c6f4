"""A tensor carries the graph of every step so far, and passes it on to the next step.

What: a variable is computed from its own previous value, with gradients. Its graph therefore grows by one step with
every step and reaches back to the beginning of training. All of these graphs stay alive. A backward through the
variable takes longer with every step.

Why: `total += loss` adds up tensors instead of numbers; a running mean of the loss (`ema = 0.9 * ema + 0.1 * loss`); a
hidden state that is passed to the next step without `detach()`; `torch.cat([seen, out])` with outputs of the model.

Cure: add up values without a graph (`total += loss.detach()`), and detach a state that must be carried on
(`h = h.detach()`).
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import detached, edited, end, graph, measured
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.source.live_frames import node_location


@rule("TM451", "graph-carried-on")
def check(evidence: LeakEvidence) -> Draft | None:
    growth = evidence.growth
    if growth.what != "chain" or evidence.put is None:
        return None
    if (evidence.is_emptied and not evidence.is_notable) or evidence.may_be_given_up:
        return None
    name = growth.held.name
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` carries the autograd graphs of all steps so far ({growth.periods} or more)"
    draft.cause = (
        f"`{name}` is made from its own last value, and its graph reaches back beyond step {growth.first.step}"
    )
    giver = evidence.giver  # of what a meter adds up
    label = "each step adds its graph to the graphs of all earlier steps"
    draft.at(evidence.at_put("cause" if giver is None else "origin", label))
    draft.at(node_location("cause", giver.file, giver.node, "given here with its graph") if giver is not None else None)
    draft.because(graph(evidence, f"`{name}`"), measured(evidence), end(evidence))
    put = giver or evidence.put
    added = _added(put.node) if giver is None else giver.value if isinstance(giver.value, ast.Name) else None
    patch = edited(put, added, detached(added)) if added else ""
    advice = f"cut the graph before the next step uses the tensor: `{name}.detach()`"
    if giver is not None:
        advice = "give it without its graph: `.detach()`"
    elif isinstance(put.node, ast.Call):
        advice = f"write to `{name}` under `torch.no_grad()`, or write values without a graph: `.detach()`"
    draft.help("add it without its graph" if patch and giver is None else advice, patch=patch)
    return draft.rated("warning")


def _added(node: ast.AST) -> ast.expr | None:
    """The expression that is added up, if it stands by itself."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.Name):
        return node.value
    return None
