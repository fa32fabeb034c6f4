"""The activations grow from layer to layer of a deep network, until they overflow.

What: in the first forward pass, before any update, every layer makes its values a factor larger than the layer before.
The diagnosis names the layers and the factor.

Why: the initial weights are too large for the width of the layers, or every layer multiplies by a matrix that is not
normalised (sums over the neighbours in a graph), and nothing normalises what is between the layers.

Cure: keep the default initialisation, or use `nn.init.kaiming_normal_` or `nn.init.xavier_uniform_`; or put a
normalisation between the layers.
"""

from __future__ import annotations

import ast

import msgspec
import torch
from torch import nn

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._growths import growths_at_start
from torchmedic.diagnose.rules.numbers._wording import noticed, victim
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Location
from torchmedic.replay.trace.values import number
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layer_construction import built_at
from torchmedic.source.syntax import syntax_tree
from torchmedic.source.user_variables import loaded_files

_MIN_FACTOR = 2.0  # per layer
_MIN_TOTAL = 1e10  # of all layers, where each adds little
_WRITERS = ("normal_", "uniform_", "fill_", "constant_", "orthogonal_", "trunc_normal_", "ones_", "mul_")


@rule("TM233", "exploding-depth")
def check(evidence: NumbersEvidence) -> Draft | None:
    grown, is_start = growths_at_start(evidence)
    layers = [each for each in grown if not each.is_recurrence and not each.is_gradient]
    found = next((each for each in layers if each.factor >= _MIN_FACTOR or each.last > _MIN_TOTAL * each.first), None)
    if found is None:
        return None
    draft = check.draft(evidence, "proven" if is_start else "likely")
    draft.message = f"the activations grow {found.factor:.3g} times in each layer and made {victim(evidence)}"
    draft.cause = f"every one of {len(found.weights)} layers multiplies its values by about {found.factor:.3g}"
    span = f"the values grow from {number(found.first)} to {number(found.last)} in {found.turns} layers"
    if found.is_by_weights:
        draft.at(_made_at(evidence, found.weights[-1], "the weights that multiply them come from here"))
    draft.at(found.spot.location("surfaced" if draft.has_place else "cause", span))
    if not found.is_by_weights:
        draft.because(f"`{found.kind}` makes the values larger, and not with weights")
        draft.help("normalise what this line multiplies by (a matrix of neighbours by its sums), or its result")
        return draft.because(noticed(evidence))
    deviation = float(found.weights[-1].detach().std())
    fan_in = found.weights[-1].numel() // found.weights[-1].shape[0]
    draft.because(
        f"the weights of such a layer deviate by {deviation:.3g}; for {fan_in} inputs {fan_in**-0.5:.3g} keeps the size"
    )
    draft.help("initialise the layers for their width (nn.init.kaiming_normal_), or normalise between them")
    return draft.because(noticed(evidence))


def _made_at(evidence: NumbersEvidence, weight: torch.Tensor, label: str) -> Location | None:
    """The only line that initialises weights by hand, else where the layer was built."""
    live = [frame.file for frame in reversed(evidence.frames) if frame.is_user]
    for file in dict.fromkeys([*live, *loaded_files()]):
        tree = syntax_tree(file)
        calls = [
            node
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITERS
        ]
        calls = [call for call in calls if "bias" not in ast.unparse(call)]
        written = [call for call in calls if "weight" in ast.unparse(call)]
        written = written or [call for call in calls if "init" in ast.unparse(call.func)]
        if len(written) == 1:
            return node_location("cause", file, written[0], label)
    layer = _owner(evidence, weight)
    built = built_at(evidence.frames, layer, label) if layer is not None else None
    return msgspec.structs.replace(built, role="cause") if built is not None else None


def _owner(evidence: NumbersEvidence, weight: torch.Tensor) -> nn.Module | None:
    roots = evidence.step.runner.modules if evidence.step is not None else []
    for root in roots:
        for module in root.modules():
            if any(each is weight for each in module.parameters(recurse=False)):
                return module
    return None
