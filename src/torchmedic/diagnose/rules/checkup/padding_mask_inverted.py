"""Attention sees the padding and none of the tokens: its mask says the opposite of what is meant.

What: the keys that attention sees were compared with the tokens of the batch. Exactly the padding is seen, and every
token is hidden.

Why: in the `key_padding_mask` of torch's attention, True hides a position. A mask of the tokens, such as
`tokens != padding` or the `attention_mask` of a tokenizer, has the opposite meaning. Sequences without padding see
nothing at all. No error is raised, and the loss may even fall a little.

Cure: invert the mask: `tokens == padding`, or `attention_mask == 0`.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.loss_graph import Node
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, innermost, syntax_tree


@rule("TM658", "padding-mask-inverted")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for mask in graph.tokens.inverted_masks:
            if not mask.is_inverted:
                continue
            draft = check.draft(evidence, "proven")
            draft.message = "attention sees the padding only: the padding mask hides the tokens"
            draft.cause = "exactly the tokens are hidden, and exactly the padding is seen"
            sites = mask.node.birth.sites if mask.node.birth is not None else ()
            made = _mask_made(mask.node)
            draft.at(made, evidence.at("surfaced" if made else "cause", sites, "is given the mask"))
            draft.because(f"the mask was compared with the tokens of the batch of step {graph.step}")
            draft.help(
                "invert the mask: in `key_padding_mask`, True stands for a position that is hidden",
                safety="changes-training",
            )
            return draft.about(step=graph.step).rated("warning")
    return None


def _mask_made(node: Node) -> Location | None:
    """The expression that a call was given as its padding mask, or the only one that its variable was set to."""
    spot = spot_of(node.birth.sites[0]) if node.birth is not None and node.birth.sites else None
    tree = syntax_tree(spot.file) if spot is not None else None
    if spot is None or tree is None:
        return None
    around = innermost(tree, spot.line, FUNCTIONS) or tree
    calls = [call for call in ast.walk(around) if isinstance(call, ast.Call) and call.lineno == spot.line]
    given = [word.value for call in calls for word in call.keywords if str(word.arg).endswith("key_padding_mask")]
    if len(given) == 1 and isinstance(given[0], ast.Name):
        name = given[0].id
        given = [
            each.value
            for each in ast.walk(around)
            if isinstance(each, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in each.targets)
        ]
    label = "is True for the tokens, which are hidden by that"
    return node_location("cause", spot.file, given[0], label) if len(given) == 1 else None
