"""The graph of the loss grows from step to step: backward goes through all earlier steps again.

What: a tensor is carried from one step to the next with its graph, so the loss of step 100 depends on all steps back to
the first one. Every step takes longer and holds more memory than the one before, and backward computes gradients for
old batches again and again.

Why: a hidden state or a running value is not detached. Without `retain_graph=True` torch would have raised an error;
with it, no error is raised.

Cure: detach every tensor that is carried over (`h = h.detach()` at the beginning of a step), and remove
`retain_graph=True`. If a history of some steps is intended, cut it after that many steps.
"""

from __future__ import annotations

import ast

from torchmedic.detect.loop.incident import GrowingGraph
from torchmedic.diagnose.rule import Rule
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Diagnosis, Location
from torchmedic.replay.trace.older_graph import Holder, bindings_of
from torchmedic.source.live_frames import node_location, syntax_tree
from torchmedic.source.spots import Place, Spot

CODE, NAME = "TM620", "growing-graph"


def check(evidence: LoopEvidence) -> Diagnosis | None:
    incident = evidence.incident
    if not isinstance(incident, GrowingGraph):
        return None
    name, sizes = incident.name, incident.sizes
    (first, _, small), (last, old, large) = sizes[0], sizes[-1]
    what = f"`{name}`" if name else "something"
    draft = RULE.draft(
        evidence,
        "proven",
        f"the graph of the loss grows in every step: {small} operations in step {first}, {large} in step {last}",
        f"{what} is carried from step to step with its graph",
    )
    bound = _bound(name, incident.is_attribute, incident.cause, incident.carried)
    backward = evidence.at("surfaced" if bound else "cause", incident.cause, "goes through all earlier steps again")
    draft.at(bound, backward)
    draft.because(f"{old} of the operations in step {last} are of earlier steps")
    draft.help(
        f"detach {what if name else 'what is carried'} where the next step takes it over, and leave "
        "`retain_graph=True` out",
        safety="changes-training",
    )
    return draft.done(severity="warning")


def _bound(name: str, is_attribute: bool, backward: Place, carried: Place | None) -> Location | None:
    """The statement that gives the variable its value, in the loop."""
    if not name:
        return None
    spot = Spot(backward.file, backward.line, None, None, None, "")
    holder = Holder(name, object() if is_attribute else None, False, spot, False, False)
    for file in dict.fromkeys(place.file for place in (carried, backward) if place is not None):
        tree = syntax_tree(file)
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)] if tree is not None else []
        inside = [found for loop in loops for found in bindings_of(holder, loop)]
        found = inside or (bindings_of(holder, tree) if tree is not None else [])
        if found:
            label = f"`{name}` keeps the graph of all steps before"
            return node_location("cause", file, found[-1], label)
    return None


RULE = Rule(CODE, NAME, check)
