"""All units of a layer have the same weights and get the same gradient, so the layer counts as a single unit.

What: the weights of a layer were compared unit by unit in several of the first steps, and so was the gradient. Both are
the same for each unit.

Why: the layer began with a constant, as by `nn.init.constant_` or `nn.init.ones_`, and so did the layer behind it.
Each unit then computes the same value and gets the same gradient, and each update keeps the units equal. A layer of any
width does no more than a layer with one unit. No error is raised.

Cure: begin with random weights, as the constructors of torch's layers do. A constant suits biases and the factors of
normalisation layers.
"""

from __future__ import annotations

import ast

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.format import listed
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.zero_weights import lastingly_identical_units
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_variables import user_trees

_CONSTANTS = ("constant_", "ones_", "fill_", "zeros_", "zero_", "ones", "full", "zeros")


@rule("TM664", "identical-units")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        looks = evidence.of_line(graph)
        found = lastingly_identical_units(looks) if graph is looks[-1] else []
        if not found:
            continue
        names = sorted(name for tensor in found if (name := evidence.name_of(tensor)))
        name = names[0] if names else "a weight"
        widest = max(found, key=len)
        draft = check.draft(evidence, "proven")
        draft.message = f"the units of a layer are all the same, and stay the same: `{name}`"
        draft.cause = "they began with the same weights, and get the same gradient in each step"
        draft.at(_made(evidence, widest))
        steps = listed([str(each.step) for each in looks])
        draft.because(f"compared in steps {steps}: {count(len(found), 'weight')} with equal units")
        draft.because(f"the widest has {len(widest)} units, and does no more than one")
        draft.help("begin with random weights, as the constructor of the layer does", safety="changes-training")
        return draft.about(step=graph.step).rated("warning")
    return None


def _made(evidence: CheckUp, tensor: torch.Tensor) -> Location | None:
    """The only line that sets weights to a constant, or else the line that builds the layer."""
    setting = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Call) and callee(node) in _CONSTANTS and _is_of_weight(node)
    ]
    if len(setting) == 1:
        return node_location("cause", *setting[0], "gives each unit the same weights")
    layer = next((layer for _, _, layer in evidence.owners(tensor)), None)
    return evidence.built("cause", layer, "each unit has the same weights") if layer is not None else None


def _is_of_weight(call: ast.Call) -> bool:
    return "bias" not in ast.unparse(call)
