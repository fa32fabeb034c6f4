"""A sequence model sees the tokens that it is to predict: later positions are not hidden.

What: the targets of the loss are the input tokens, one position later. Attention without a mask, with a mask that hides
the wrong half or one position too few, or a recurrence in both directions shows each position the next token. Or the
targets of a model that hides the later positions are the input tokens themselves: they were not moved by a position.

Why: the model copies the next token instead of predicting it. The loss falls to almost nothing, also on text that
cannot be predicted, and what the model generates is worthless, since there the next token is not known. No error is
raised.

Cure: hide all later positions: a boolean mask `torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)` of what is
hidden, or `is_causal=True` for `scaled_dot_product_attention`. Use a recurrence that runs forwards only. Compare the
scores of position t with token t + 1.
"""

from __future__ import annotations

import os

import torch

from torchmedic.detect.loop.thrown_away import thrown_away
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.shown_targets import Sight, layer_of
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import FUNCTIONS, innermost, syntax_tree

_MASKING = ("WhereBackward", "AddBackward")
_MASKS = ("masked_fill", "masked_scatter", "tril")  # without an underscore they return a new tensor
_MAX_BETWEEN = 6  # nodes between a mask and the softmax


@rule("TM656", "target-in-sight")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for sight in graph.tokens.sights:
            if sight.is_shifted and sight.is_open and sight.later < 2:
                return _diagnosis(evidence, graph, sight) if sight.later else _of_same_tokens(evidence, graph, sight)
    return None


def _diagnosis(evidence: CheckUp, graph: LossGraph, sight: Sight) -> Draft:
    node, layer = sight.node, layer_of(sight.node)
    is_recurrent = isinstance(layer, torch.nn.RNNBase)
    mask = _mask(graph, node)
    draft = check.draft(evidence, "proven")
    draft.message = "the model sees the tokens that it is to predict"
    if is_recurrent:
        draft.cause = "the recurrence also runs backwards, so each position knows the tokens after it"
        draft.at(evidence.of_node("cause", node, "`bidirectional=True` shows the next token"))
        draft.help("build the layer without `bidirectional=True`", safety="changes-training")
    else:
        draft.cause = "attention does not hide the next position, and the next token is the target"
        birth = (mask or node).birth
        sites = birth.sites if birth is not None else ()
        here = evidence.at("cause", sites, "does not hide the next position")
        draft.at(_lost_mask(here) or here)
        draft.help(
            "hide the later positions: `is_causal=True`, or a mask that is True above the diagonal, "
            "`torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)`",
            safety="changes-training",
        )
    draft.at(evidence.at("surfaced", sight.call.sites, "the targets are the input, one position later"))
    draft.because(f"the targets were compared with the tokens of the input, in step {graph.step}")
    return draft.about(step=graph.step).rated("warning")


def _lost_mask(softmax: Location | None) -> Location | None:
    """The line of the same function that masks scores and throws its result away."""
    if softmax is None:
        return None
    file = os.path.abspath(softmax.file)
    function = innermost(syntax_tree(file), softmax.line, FUNCTIONS)
    lost = [node for node, what in thrown_away(function) if what in _MASKS] if function is not None else []
    return node_location("cause", file, lost[0], "its result is thrown away, so nothing is hidden") if lost else None


def _of_same_tokens(evidence: CheckUp, graph: LossGraph, sight: Sight) -> Draft:
    draft = check.draft(evidence, "likely")
    draft.message = "the model is to predict the tokens that it is given, and not the next ones"
    draft.cause = "the targets are the input, position by position, and each position sees its own token"
    draft.at(evidence.at("cause", sight.call.sites, "the targets are not moved by one position"))
    draft.at(evidence.of_node("surfaced", sight.node, "a position sees itself and no later one"))
    draft.because(f"the targets were compared with the tokens of the input, in step {graph.step}")
    draft.help(
        "compare position t with token t + 1: the input is `tokens[:, :-1]`, the targets are `tokens[:, 1:]`",
        safety="changes-training",
    )
    return draft.about(step=graph.step).rated("warning")


def _mask(graph: LossGraph, node: Node) -> Node | None:
    """The operation of the user's that masks the scores of a softmax."""
    for _ in range(_MAX_BETWEEN):
        if not node.behind:
            return None
        node = graph.nodes[node.behind[0]]
        if node.kind == "MaskedFillBackward" or (node.kind in _MASKING and node.missing):
            return node
    return None
