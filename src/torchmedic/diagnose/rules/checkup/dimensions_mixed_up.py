"""Examples, positions or classes are mixed up: a view exchanges dimensions, or a layer was given another layout.

What: a `view` or `reshape` gives a tensor the shape of its transpose. The values stay in their order, so each row of
the result holds values of several examples, positions or classes. Or it joins the heads of an attention, which stand
before the positions, without transposing them back. Or a recurrent layer or an attention layer with
`batch_first=False` was given the examples first, and takes the examples of a batch for the steps of one sequence. Or a
positional encoding of the shape (length, 1, width) is added to examples that come first.

Why: shapes fit, so no error is raised. The inputs no longer belong to their targets, and the loss stands still.

Cure: write `transpose` or `permute` instead of `view`. Build the layer with `batch_first=True`. Give the encoding the
shape (1, length, width), and take its rows with `self.pe[:, : x.size(1)]`.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.mixed_dimensions import layers_with_wrong_layout, merged_heads, mixing_views, takes_last
from torchmedic.observe.checkup.row_tables import added_tables, has_examples_first
from torchmedic.source.lookup.layers import copied_layer_built_at


@rule("TM646", "dimensions-mixed-up")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for node, before, after, is_loss in mixing_views(graph):
            what = "the classes with the positions" if is_loss else "the examples of a batch with each other"
            draft = check.draft(evidence, "proven")
            draft.message = f"a view mixes {what}: it gives a tensor the shape of its transpose"
            draft.cause = f"the shape changes from {list(before)} to {list(after)}, and the values keep their order"
            draft.at(evidence.of_node("cause", node, "does not move any value"))
            draft.help("write `transpose` or `permute` instead", safety="changes-training")
            return draft.about(step=graph.step).rated("warning")
        for node, source in merged_heads(graph):
            draft = check.draft(evidence, "proven")
            draft.message = "a view mixes the positions with each other: it joins heads that stand before the positions"
            draft.cause = (
                f"the shape changes from {list(source.shape or ())} to {list(node.shape or ())}, and the values keep "
                "their order"
            )
            draft.at(evidence.of_node("cause", node, "does not move any value"))
            draft.because("the step transposed heads and positions before, and does not transpose them back")
            draft.help("write `transpose(1, 2)` before the view", safety="changes-training")
            return draft.about(step=graph.step).rated("warning")
        for layer, node in layers_with_wrong_layout(graph):
            examples, positions = (node.shape or (0, 0))[:2]
            is_drawn = examples in evidence.drawn
            if not is_drawn and not (isinstance(layer, torch.nn.RNNBase) and takes_last(graph, node)):
                continue  # the first dimension may be time, with a target for each step
            kind = type(layer).__name__
            is_copied = isinstance(layer, torch.nn.MultiheadAttention)
            draft = check.draft(evidence, "possible")  # sizes alone do not tell examples from steps
            draft.message = f"`{kind}` may take the {examples} examples of a batch for the steps of one sequence"
            draft.cause = (
                f"the layer has batch_first=False and was given {examples} x {positions} values, examples first"
            )
            built = (copied_layer_built_at("cause", "batch_first=False") if is_copied else None) or evidence.built(
                "cause", layer, "batch_first=False"
            )
            draft.at(built or evidence.of_node("cause", node, "given here"))
            draft.because(
                f"the {examples} rows were drawn at random, so they have no order"
                if is_drawn
                else "the last element of the second dimension is used, as the last step of a sequence is",
                f"the loss compares {examples} rows with targets, so these are probably the examples",
            )
            draft.help("build the layer with `batch_first=True`", safety="changes-training")
            return draft.about(step=graph.step).rated("warning")
        for node, name in added_tables(graph):
            found = _table(evidence, graph, node, name)
            if found is not None:
                return found
    return None


def _table(evidence: CheckUp, graph: LossGraph, node: Node, name: str) -> Draft | None:
    """Rows that belong to positions are added to examples."""
    table = _attribute(evidence, node, name)
    examples, positions, width = node.shape or (0, 0, 0)
    is_per_row = table is not None and table.dim() == 3 and len(table) > 1 and table.shape[1:] == (1, width)
    if table is None or not is_per_row or not has_examples_first(graph, node, evidence.drawn):
        return None
    draft = check.draft(evidence, "likely")
    draft.message = f"`{name}` gives each example a row of its own, and all its positions the same"
    draft.cause = (
        f"the rows of {list(table.shape)} values go along the {examples} examples, not the {positions} positions"
    )
    draft.at(evidence.of_node("cause", node, "takes the first rows along the wrong dimension"))
    draft.because(
        f"a batch has {examples} examples that were drawn at random, so they have no order"
        if evidence.drawn
        else f"the loss compares {examples} rows with targets, so these are probably the examples"
    )
    draft.help(
        f"build `{name}` with the shape (1, length, {width}), and take `self.{name}[:, :x.size(1)]`",
        safety="changes-training",
    )
    return draft.about(step=graph.step).rated("warning")


def _attribute(evidence: CheckUp, node: Node, name: str) -> torch.Tensor | None:
    """The tensor of this name of the module whose `forward` built a node."""
    code = node.birth.sites[0].code if node.birth is not None else None
    modules = (part for model in evidence.models for part in model.modules())
    owners = (part for part in modules if getattr(type(part).forward, "__code__", None) is code)
    found = next((getattr(part, name, None) for part in owners), None)
    return found if isinstance(found, torch.Tensor) else None
