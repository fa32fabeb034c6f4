"""A considerable part of the step is computed in float64, because a float64 tensor entered the computation.

What: the weights are float32, but from one operation on the graph is float64. float64 is slower on every device, much
slower on most GPUs, and takes twice the memory. The gradients are rounded to float32 at the end, so there is no
benefit.

Why: NumPy computes in float64, and `torch.from_numpy` and `torch.tensor` keep that. An operation of a float32 and a
float64 tensor gives float64.

Cure: convert the data to float32 where it enters: `torch.from_numpy(a).float()`,
`torch.tensor(a, dtype=torch.float32)`.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_facts import promotions, share_in_double
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Site
from torchmedic.source.live_frames import by_span
from torchmedic.source.syntax import syntax_tree

_MIN_SHARE_OF_VALUES = 0.2
_MIN_VALUES_FELT = 1 << 16  # below that it is not felt
_MIN_VALUES_NOTED = 1 << 12  # and below that not even noted


@rule("TM638", "promoted-to-double")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        nodes = [node for node in promotions(graph) if node.birth is not None and node.birth.sites]
        if nodes and share_in_double(graph.nodes)[0] >= _MIN_VALUES_NOTED:
            return _diagnosis(evidence, graph, min(nodes, key=lambda node: node.sequence))
    return None


def _diagnosis(evidence: CheckUp, graph: LossGraph, node: Node) -> Draft:
    assert node.birth is not None
    doubled, values = share_in_double(graph.nodes)
    share = doubled / max(values, 1)
    name = _name_of_double(evidence, node.birth.sites[0])
    what = f"`{name}` is float64" if name else "a float64 tensor enters here"
    draft = check.draft(evidence, "proven")
    draft.message = f"{share:.0%} of the step is computed in float64, although the weights are not"
    draft.cause = f"{what}, and what it meets becomes float64 too"
    draft.at(evidence.at("cause", node.birth.sites, f"float64 from here on: {what}"))
    draft.because(f"{doubled} of {values} values of the graph are float64, in step {graph.step}")
    fix = f"`{name}.float()`" if name else "`.float()`"
    draft.help(f"{fix}, best where the data is made", safety="changes-training")
    is_felt = share >= _MIN_SHARE_OF_VALUES and doubled >= _MIN_VALUES_FELT
    return draft.about(step=graph.step).rated("warning" if is_felt else "note")


def _name_of_double(evidence: CheckUp, site: Site) -> str:
    """The variable in the expression that is float64 and no part of the graph; empty where it cannot be told."""
    spot, tree = spot_of(site), syntax_tree(site.code.co_filename)
    if tree is None or spot.end_line is None or spot.column is None or spot.end_column is None:
        return ""
    inside = [
        node
        for outer in by_span(tree).get((spot.line, spot.column, spot.end_line, spot.end_column), [])
        for node in ast.walk(outer)
    ]
    frame = next((found for found in evidence.frames if found.live.f_code is site.code), None)
    values = frame.variables if frame is not None else {}
    held = {name: tensor for model in evidence.models for part in model.modules() for name, tensor in _held(part)}
    doubles = [node.id for node in inside if isinstance(node, ast.Name) and _is_double(values.get(node.id))]
    doubles += [
        ast.unparse(node) for node in inside if isinstance(node, ast.Attribute) and _is_double(held.get(node.attr))
    ]
    return doubles[0] if len(set(doubles)) == 1 else ""


def _held(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [*module._buffers.items(), *module.__dict__.items()]


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64 and not value.requires_grad
