"""A term of the loss has no graph, so it adds nothing to any gradient.

What: the loss is a sum, and one of its terms was cut off from the weights that it is computed from: by `item()`,
`detach()`, `float()` or `torch.tensor()`, or because it comes from `autograd.grad` without `create_graph=True`.

Why: autograd sees such a term as a constant. It changes the printed loss and no gradient: a penalty that penalises
nothing, a regularisation that does not regularise. No error is raised.

Cure: let the term keep its graph. For a penalty on gradients, write `create_graph=True`. Use `item()` or `detach()` for
the log only.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_cuts import Cut
from torchmedic.observe.checkup.graph_facts import partial_sums
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import LostTerms, MixedSum
from torchmedic.records import Diagnosis
from torchmedic.source.lookup.term_flow import expressions_behind, names_in, operands, sum_at
from torchmedic.source.spots import Spot

_HOW = {
    "autograd.grad": "`autograd.grad` without `create_graph=True`",
    "data": "`.data`",
    "__float__": "`float()`",
}


@rule("TM645", "loss-term-without-graph")
def check(evidence: CheckUp) -> Diagnosis | None:
    for graph in evidence.graphs:
        if graph.lost_terms is not None:
            found = _lost_term(evidence, graph, graph.lost_terms)
            if found is not None:
                return found
    return None


def _lost_term(evidence: CheckUp, graph: LossGraph, lost: LostTerms) -> Diagnosis | None:
    places = {node.birth.sites[0] for node in partial_sums(graph) if node.birth is not None and node.birth.sites}
    for mixed in lost.sums:
        if not mixed.sites or mixed.sites[0] not in places:
            continue
        term, cuts = _cuts_of(mixed, lost.cuts)
        if term is not None and cuts:
            return _diagnosis(evidence, graph, term, mixed, cuts)
    return None


def _cuts_of(mixed: MixedSum, cuts: list[Cut]) -> tuple[ast.expr | None, list[Cut]]:
    """The term without a graph, and the lines that took the graph from what it was computed from."""
    spot = spot_of(mixed.sites[0])
    found = sum_at(spot)
    if found is None:
        return None, []
    left, right = operands(found)
    term, other = (right, left) if mixed.is_right else (left, right)
    flow = expressions_behind(term, found, spot.file)
    if names_in(term) & names_in(other):
        return None, []  # as in `a + (b - a).detach()`, which gives a loss another value on purpose
    return term, [cut for cut in cuts if any(_covers(flow, spot_of(site), spot.file) for site in cut.sites)]


def _covers(flow: list[ast.expr], spot: Spot, file: str) -> bool:
    return spot.file == file and any(
        (node.lineno, node.col_offset) <= (spot.line, spot.column or 0)
        and (spot.end_line or spot.line, spot.end_column or 0) <= (node.end_lineno or 0, node.end_col_offset or 0)
        for node in flow
    )


def _diagnosis(evidence: CheckUp, graph: LossGraph, term: ast.expr, mixed: MixedSum, cuts: list[Cut]) -> Diagnosis:
    cut = cuts[-1]
    others = {other.sites[0]: other for other in cuts if other.sites[0] != cut.sites[0]}
    how = _HOW.get(cut.name, f"`{cut.name}()`")
    text = ast.unparse(term)
    draft = check.draft(
        evidence,
        "likely" if others and cut.name != "autograd.grad" else "proven",
        f"the term `{text}` of the loss has no graph, so it adds nothing to any gradient",
        f"{how} drops the graph of what it is computed from",
    )
    draft.at(
        spot_of(cut.sites[0]).location("cause", "the graph ends here"),
        *(
            spot_of(other.sites[0]).location("origin", "and here")
            for other in others.values()
            if cut.name != "autograd.grad"
        ),
        evidence.at("surfaced", mixed.sites, f"`{text}` is a constant here"),
    )
    draft.because(f"the graph that is dropped leads to {len(cut.behind)} tensors that require a gradient")
    if cut.name == "autograd.grad":
        draft.help("write `create_graph=True`", safety="changes-training")
    else:
        draft.help(f"add the term without {how}; use {how} for the log only", safety="changes-training")
    return draft.done(step=graph.step, severity="warning")
