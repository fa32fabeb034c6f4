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
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.leaks.source.traffic import traffic
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.observe.heap.walk import Held
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS
from torchmedic.source.user_variables import user_files, user_trees


@loop_rule("TM620", "growing-graph", GrowingGraph)
def check(evidence: LoopEvidence, incident: GrowingGraph) -> Draft | None:
    held, sizes = incident.held, incident.sizes
    (first, _, small), (last, old, large) = sizes[0], sizes[-1]
    what = f"`{held.name}`" if held is not None else "something"
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"the graph of the loss grows in every step: {small} operations in step {first}, {large} in step {last}"
    )
    draft.cause = f"{what} is carried from step to step with its graph"
    bound = _bound(held) if held is not None else None
    backward = evidence.at(
        "surfaced" if bound else "cause", incident.cause, "backward goes through all earlier steps again"
    )
    draft.at(bound, backward)
    draft.because(f"{old} of the operations in step {last} are of earlier steps")
    draft.help(
        f"detach {what if held is not None else 'what is carried'} where the next step takes it over, and leave "
        "`retain_graph=True` out",
        safety="changes-training",
    )
    return draft.rated("warning")


def _bound(held: Held) -> Location | None:
    """The statement that gives the variable its value; one inside of a loop where there are several."""
    puts = sorted(traffic(held, user_files()).puts, key=lambda site: not site.loops)
    label = f"`{held.name}` keeps the graph of all steps before"
    if puts:
        return node_location("cause", puts[0].file, puts[0].node, label)
    found = _assignments(held.name.rpartition(".")[2]) if "." in held.name else []
    return node_location("cause", *found[0], label) if len(found) == 1 else None


def _assignments(attribute: str) -> list[tuple[str, ast.Assign]]:
    """The statements outside of constructors that give an attribute of this name its value."""
    found = []
    for file, tree in user_trees():
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name != "__init__"]
        for node in {node for function in functions for node in ast.walk(function)}:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Attribute) and target.attr == attribute for target in node.targets
            ):
                found.append((file, node))
    return found
