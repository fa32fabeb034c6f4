"""A language model is trained to predict the token after the next one: the labels are shifted twice.

What: the targets of the loss are the input tokens, two positions later. No position is trained to predict the next one.

Why: models of Hugging Face shift the labels themselves, and are to be given labels that are equal to the input. A
dataset that shifts them as well makes two positions of one. So does a loss that shifts labels which the data has
shifted already. The loss falls as usual, and the text that the model generates is worthless. No error is raised.

Cure: shift in one place only: `labels = input_ids` for a model that shifts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_variables import user_trees


@rule("TM659", "labels-shifted-twice")
def check(evidence: CheckUp) -> Draft | None:
    found = [(graph, sight) for graph in evidence.graphs for sight in graph.tokens.sights if sight.later == 2]
    telling = [(graph, sight) for graph, sight in found if sight.is_shifted]
    if any(sight.later == 1 for graph in evidence.graphs for sight in graph.tokens.sights):
        return None  # another loss predicts the next token
    shifts = sorted(_shifts(), key=lambda each: (each[0], each[1].lineno))
    if not telling or not shifts:
        return None  # without a shift by one position, two positions may be meant
    graph, sight = telling[0]
    draft = check.draft(evidence, "likely")
    draft.message = "the labels are shifted twice: the model learns the token after the next one"
    draft.cause = "the targets of the loss are the tokens of the input, two positions later"
    draft.at(node_location("cause", *shifts[0], "shifts the labels by one position"))
    draft.at(evidence.at("surfaced", sight.call.sites, "the loss gets them shifted by two"))
    draft.because(f"the targets were compared with the tokens of the input, in step {graph.step}")
    draft.help("shift in one place: give a model that shifts by itself labels that are equal to its input")
    return draft.about(step=graph.step).rated("warning")


def _shifts() -> Iterator[tuple[str, ast.Subscript]]:
    """The expressions of the user's that leave out the first position: `ids[1:]`, `ids[:, 1:]`. Only these shift."""
    for file, tree in user_trees():
        for node in nodes_in(tree):
            if not isinstance(node, ast.Subscript):
                continue
            slices = [part for part in ast.walk(node.slice) if isinstance(part, ast.Slice)]
            lowest = [part.lower for part in slices if part.upper is None]
            if any(isinstance(each, ast.Constant) and each.value == 1 for each in lowest):
                yield file, node
