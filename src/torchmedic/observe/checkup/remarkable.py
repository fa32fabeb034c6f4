"""Whether any rule could have something to say about the graph of a loss: asked first, as the rules take time."""

from __future__ import annotations

from torchmedic.observe.checkup import mixed_dimensions, normalisations
from torchmedic.observe.checkup.graph_facts import activation_of, is_stretched, is_too_high, promotions
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.padded_ends import padded_ends
from torchmedic.observe.checkup.padded_targets import MIN_SHARE
from torchmedic.observe.checkup.policy_terms import are_remarkable
from torchmedic.observe.checkup.row_tables import added_tables
from torchmedic.observe.checkup.targets import PAIRED
from torchmedic.observe.checkup.zero_weights import identical_units, zero_product

_ACTIVATIONS = ("SoftmaxBackward", "SigmoidBackward")
_SCORED = ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "kl_div")


def is_remarkable(graph: LossGraph) -> bool:
    return (
        bool(graph.autocast or graph.is_outdated or graph.dead_ends)
        or any(root.node is None for root in graph.roots)
        or any(node.closed for node in graph.gates())
        or any(count for count, _ in graph.outside.values())
        or any(sight.is_shifted and sight.is_open for sight in graph.tokens.sights)
        or is_too_high(graph)
        or bool(promotions(graph))
        or any(mixed_dimensions.mixing_views(graph))
        or any(mixed_dimensions.merged_heads(graph))
        or any(mixed_dimensions.layers_with_wrong_layout(graph))
        or any(added_tables(graph))
        or any(padded_ends(graph))
        or any(mask.is_inverted for mask in graph.tokens.inverted_masks)
        or any(padded.share >= MIN_SHARE for padded in graph.tokens.padded)
        or (graph.has_distributions and are_remarkable(graph))
        or normalisations.are_remarkable(graph)
        or graph.lost_terms is not None
        or zero_product(graph) is not None
        or any(identical_units(graph))
        or _has_remarkable_call(graph)
        or any(is_stretched(node) for node in graph.nodes)
    )


def _has_remarkable_call(graph: LossGraph) -> bool:
    """Whether a loss function is given what an activation made, or a target of another number of dimensions."""
    for call in graph.losses():
        node = activation_of(graph, call)
        if node is not None and node.kind in _ACTIVATIONS and call.name in _SCORED:
            return True
        if call.name in PAIRED and len(call.shape) != len(call.target_shape):
            return True
    return False
