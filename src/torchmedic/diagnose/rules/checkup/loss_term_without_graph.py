"""A term of the loss has no graph, so it adds nothing to any gradient.

What: the loss is a sum, and one of its terms was cut off from the weights that it is computed from: by `item()`,
`detach()`, `float()` or `torch.tensor()`, because it comes from `autograd.grad` without `create_graph=True`, because a
module computes it under `no_grad`, or because it is computed from a comparison or an `argmax`, which have no gradient
(a Dice loss of a thresholded mask). Or a loss function was given nothing that a trained weight has a part in, such as
the teacher's output twice.

Why: autograd sees such a term as a constant. It changes the printed loss and no gradient: a penalty that penalises
nothing, a regularisation that does not regularise. No error is raised.

Cure: let the term keep its graph. For a penalty on gradients, write `create_graph=True`. Use `item()` or `detach()` for
the log only.
"""

from __future__ import annotations

import ast
import itertools

from torchmedic.diagnose.rule import rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_cuts import Cut
from torchmedic.observe.checkup.graph_facts import partial_sums
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import CHOOSING, HOW, LostTerms, MixedSum
from torchmedic.observe.checkup.node_births import Site
from torchmedic.records import Diagnosis
from torchmedic.source.lookup.term_flow import (
    Callees,
    Part,
    expression_at,
    names_in,
    operands,
    parts_behind,
    span_of,
    sum_at,
    terms_of,
)
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import nodes_in, syntax_tree

_READS = ("item", "__float__")
_NEVER_GRADED = frozenset(CHOOSING) - {"argmax"}


@rule("TM645", "loss-term-without-graph")
def check(evidence: CheckUp) -> Diagnosis | None:
    for graph in evidence.graphs:
        if graph.lost_terms is not None:
            for look in (_lost_term, _foreign_term, _term_of_inputs):
                found = look(evidence, graph, graph.lost_terms)
                if found is not None:
                    return found
    return None


def _lost_term(evidence: CheckUp, graph: LossGraph, lost: LostTerms) -> Diagnosis | None:
    nodes = [node for node in partial_sums(graph) if node.birth is not None and node.birth.sites]
    places = {node.birth.sites[0] for node in nodes if node.birth is not None}
    sums = [mixed for mixed in lost.sums if mixed.sites and mixed.sites[0] in places]
    sums += [
        MixedSum(node.birth.sites, True, index)
        for node in nodes
        if node.kind == "StackBackward" and node.birth is not None
        for index in node.missing
    ]
    # To cut off what no optimizer has, as a teacher, is meant.
    trained = {id(tensor) for tensor in evidence.optimized}
    dropped = [cut for cut in lost.cuts if not trained or cut.behind & trained]
    # A comparison makes a mask of many a value that keeps its graph: it counts where nothing else was dropped.
    chosen = [cut for cut in dropped if cut.name in _NEVER_GRADED]
    dropped = [cut for cut in dropped if cut.name not in _NEVER_GRADED]
    for mixed, known in itertools.product(sums, (dropped, chosen, lost.constants)):
        if known is chosen and any(_line_of(cut.sites) == _line_of(mixed.sites) for cut in dropped):
            continue  # as in `hard + soft - soft.detach()`, which gives a loss another value on purpose
        term, cuts = _cuts_of(mixed, known, _callees(known))
        if term and cuts:
            # A cut after which parameters get no gradient at all says more than a baseline that is learned elsewhere.
            reached = {id(leaf) for leaf in graph.leaves()}
            cuts.sort(key=lambda cut: not cut.behind <= reached)
            return _diagnosis(evidence, graph, term, mixed, cuts)
    return None


def _foreign_term(evidence: CheckUp, graph: LossGraph, lost: LostTerms) -> Diagnosis | None:
    """A term that trains nothing, because what the optimizer trains was cut off before a layer of another model."""
    foreign = graph.foreign
    if foreign is None or foreign.is_used:
        return None
    cuts = [cut for cut in lost.cuts if cut.behind & foreign.owned and cut.sites and not cut.is_of_other_turn]
    cuts = [cut for cut in cuts if cut.name not in _NEVER_GRADED]
    sites = dict.fromkeys(site for call in lost.calls_of(foreign.leaves) for site in call)
    calls = [part for site in sites if (part := expression_at(spot_of(site))) is not None]
    flow = [part for call in calls for part in parts_behind((call,))]
    cuts = [cut for cut in cuts if any(part.covers(spot_of(site)) for site in cut.sites for part in flow)]
    if len({cut.sites[0] for cut in cuts}) != 1:
        return None
    cut = cuts[-1]
    how = HOW.get(cut.name, f"`{cut.name}()`")
    draft = check.draft(
        evidence,
        "proven",
        "a term of the loss adds nothing to the gradient of any parameter that the next update changes",
        f"{how} drops the graph before the layers that compute the term",
    )
    draft.at(
        evidence.at("cause", cut.sites, "the graph ends here"),
        evidence.of_node("surfaced", foreign.whole, "one term of this sum trains nothing"),
    )
    draft.because(
        f"the term reaches {len(foreign.leaves)} parameters of another model, whose gradients are cleared before they "
        f"are used, and none of the {len(foreign.owned)} that the optimizer has",
        f"the graph that is dropped leads to {len(cut.behind & foreign.owned)} of those",
    )
    cure = "use `rsample()`" if cut.name == "sample" else f"give the layers the tensor without {how}"
    return draft.help(cure, safety="changes-training").done(step=graph.step, severity="warning")


def _term_of_inputs(evidence: CheckUp, graph: LossGraph, lost: LostTerms) -> Diagnosis | None:
    """A term that has a graph only by inputs, as by `cos(t)`: the weights were in a derivative that has none."""
    foreign = graph.foreign
    birth = foreign.whole.birth if foreign is not None else None
    if foreign is None or foreign.is_used or birth is None or not birth.sites or lost.calls_of(foreign.leaves):
        return None
    cuts = [cut for cut in lost.cuts if not cut.is_of_other_turn and cut.sites]
    index = next((place for place, number in foreign.whole.inputs() if number == foreign.term.number), None)
    if index is None or not cuts:
        return None
    text, found = _cuts_of(MixedSum(birth.sites, index == 1), cuts, _callees(cuts))
    if not text or len({cut.sites[0] for cut in found}) != 1 or found[0].name != "autograd.grad":
        return None  # what is detached as well, as the samples of an energy, is meant to have no graph
    behind = found[0].behind
    if not behind & foreign.owned or not behind - foreign.owned:
        return None
    draft = check.draft(
        evidence,
        "proven",
        f"the term `{text}` of the loss adds nothing to the gradient of any trained parameter",
        f"{HOW['autograd.grad']} drops the graph that leads to the parameters; only the inputs are left in the term",
    )
    draft.at(
        evidence.at("cause", found[0].sites, "the graph ends here"),
        evidence.of_node("surfaced", foreign.whole, f"`{text}` trains nothing"),
    )
    draft.because(f"the graph that is dropped leads to {len(behind & foreign.owned)} trained parameters")
    draft.help("write `create_graph=True`", safety="changes-training")
    return draft.done(step=graph.step, severity="warning")


def _callees(cuts: list[Cut]) -> Callees:
    """The functions of the user's in which cuts were made, by the expressions that called them."""
    return {span_of(spot_of(outer)): inner.code for cut in cuts for inner, outer in itertools.pairwise(cut.sites)}


def _cuts_of(mixed: MixedSum, cuts: list[Cut], callees: Callees) -> tuple[str, list[Cut]]:
    """The term without a graph, and the lines that took the graph from what it was computed from."""
    spot = spot_of(mixed.sites[0])
    found = sum_at(spot)
    if found is None:
        return "", []
    terms = terms_of(found, spot.file, index=mixed.position, is_right=mixed.is_right, callees=callees)
    if not terms:
        return "", []
    flow = parts_behind(terms)
    places = [(cut, map(spot_of, (*cut.sites, *cut.entered))) for cut in cuts]
    behind = [cut for cut, spots in places if any(part.covers(spot) for spot in spots for part in flow)]
    if not isinstance(found, ast.Call):
        other = _names_outside_arguments(operands(found)[0 if mixed.is_right else 1])
        inside = [spot for cut in behind if terms[-1].covers(spot := spot_of(cut.sites[0]))]
        if any(other & _names_at(spot) for spot in inside):
            return "", []  # as in `a + (b - a).detach()`, which gives a loss another value on purpose
    return _text(terms), sorted(behind, key=lambda cut: bool(cut.entered))


def _line_of(sites: tuple[Site, ...]) -> tuple[str, int] | None:
    return (spot.file, spot.line) if sites and (spot := spot_of(sites[0])) else None


def _names_at(spot: Spot) -> set[str]:
    """The names in the expression at a spot, without those that are imported."""
    found = expression_at(spot)
    imported = (each for each in nodes_in(syntax_tree(spot.file)) if isinstance(each, ast.alias))
    return names_in(found.expression) - {each.asname or each.name for each in imported} if found is not None else set()


def _how(cut: Cut) -> str:
    """What drops the graph, as the user wrote it: torch calls `float` itself for the items of a list."""
    found = expression_at(spot_of(cut.sites[0])) if cut.name == "__float__" else None
    if found is not None and isinstance(found.expression, ast.Call):
        return f"`{ast.unparse(found.expression.func)}()`"
    return HOW.get(cut.name, f"`{cut.name}()`")


def _names_outside_arguments(node: ast.AST) -> set[str]:
    """The names that are added or multiplied themselves, not given to a function."""
    if isinstance(node, ast.Call):
        return _names_outside_arguments(node.func)
    inner = (_names_outside_arguments(part) for part in ast.iter_child_nodes(node))
    return {node.id} if isinstance(node, ast.Name) else set[str]().union(*inner)


def _text(terms: tuple[Part, ...]) -> str:
    term = terms[-1].expression
    return ast.unparse(term.value if isinstance(term, ast.Yield) and term.value is not None else term)


def _is_log(cut: Cut, cuts: list[Cut], mixed: MixedSum) -> bool:
    """Whether one expression reads the values of several terms: as for a log, and the sum takes one of those."""
    return (
        cut.name in _READS
        and not cut.entered
        and sum(other.sites[0] == cut.sites[0] for other in cuts) > 1
        and spot_of(cut.sites[0]).line != spot_of(mixed.sites[0]).line
    )


def _constant(evidence: CheckUp, graph: LossGraph, text: str, mixed: MixedSum, cut: Cut) -> Diagnosis:
    draft = check.draft(
        evidence,
        "proven",
        f"the term `{text}` of the loss has no graph, so it adds nothing to any gradient",
        f"nothing that `{cut.name}` is given depends on a trained parameter",
    )
    draft.at(
        evidence.at("cause", cut.sites, f"`{cut.name}` of values without a graph"),
        evidence.at("surfaced", mixed.sites, f"`{text}` is a constant here"),
    )
    draft.help(f"give `{cut.name}` what the trained model computes", safety="changes-training")
    return draft.done(step=graph.step, severity="warning")


def _diagnosis(evidence: CheckUp, graph: LossGraph, text: str, mixed: MixedSum, cuts: list[Cut]) -> Diagnosis:
    cut = cuts[-1]
    if not cut.behind:
        return _constant(evidence, graph, text, mixed, cut)
    others = {other.sites[0]: other for other in cuts if other.sites[0] != cut.sites[0]}
    how = _how(cut)
    draft = check.draft(
        evidence,
        "likely" if others and cut.name != "autograd.grad" else "proven",
        f"the term `{text}` of the loss has no graph, so it adds nothing to any gradient",
        f"{how} drops the graph of what it is computed from",
    )
    is_log = _is_log(cut, cuts, mixed)
    draft.at(
        evidence.at("cause", mixed.sites, f"takes `{text}` from what was read for a log") if is_log else None,
        (evidence.switched_off(cut.sites) if cut.name == "no_grad" else None)
        or spot_of(cut.sites[0]).location("origin" if is_log else "cause", "the graph ends here"),
        *(
            spot_of(other.sites[0]).location("origin", "and here")
            for other in others.values()
            if cut.name != "autograd.grad"
        ),
        None if is_log else evidence.at("surfaced", mixed.sites, f"`{text}` is a constant here"),
    )
    draft.because(f"the graph that is dropped leads to {len(cut.behind)} tensors that require a gradient")
    if cut.name == "autograd.grad":
        draft.help("write `create_graph=True`", safety="changes-training")
    elif cut.name in CHOOSING:
        draft.help(f"compute the term from the scores themselves: {how} has no gradient", safety="changes-training")
    else:
        draft.help(f"add the term without {how}; use {how} for the log only", safety="changes-training")
    return draft.done(step=graph.step, severity="warning")
