"""`backward()` is called on a loss without a graph, so no gradient reaches the weights.

What: the loss has no graph. It was built from numbers (`torch.tensor(loss.item(), requires_grad=True)`), or it had lost
its graph and `requires_grad` was set on it. Its backward writes the gradient of that one number and ends.

Why: `requires_grad_()` and `requires_grad=True` make a tensor a *leaf*, a new starting point. They do not connect it to
the tensors it was computed from. torch raises an error for a loss without a graph; setting `requires_grad` hides the
error and not its cause.

Cure: call backward on the result of the computation itself. Use `item()` separately for numbers that are only printed.
If the loss has no graph, find the line that cut it: torch raises an error as soon as `requires_grad_()` is removed.
"""

from __future__ import annotations

import ast

import msgspec

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_cuts import Cut
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import CHOOSING, HOW
from torchmedic.records import Location
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.term_flow import parts_behind, value_of_call
from torchmedic.source.syntax import FUNCTIONS, callee, calls_in, nodes_in, own_nodes
from torchmedic.source.user_variables import user_trees


@rule("TM630", "loss-without-way-back")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        if evidence.optimized and _is_made_by_hand(graph, evidence):
            return _diagnosis(graph, evidence)
    return None


def _is_made_by_hand(graph: LossGraph, evidence: CheckUp) -> bool:
    """Whether all that backward was called on are single numbers without a graph, and no parameters."""
    known = {id(tensor) for tensor in evidence.optimized}
    return bool(graph.roots) and all(
        root.node is None and root.size == 1 and root.identity not in known for root in graph.roots
    )


def _diagnosis(graph: LossGraph, evidence: CheckUp) -> Draft:
    found, forced = _made_at(graph, evidence)
    cut = _cut(graph, evidence)
    how = "told to require a gradient" if forced else "made from numbers"
    draft = check.draft(evidence, "proven")
    draft.message = "backward is called on a loss without a graph: no weight gets a gradient"
    draft.cause = f"the loss was {how}, so it is a new leaf and not the result of the model"
    ends: Location | None = None
    if cut is not None:
        made = HOW.get(cut.name, f"`{cut.name}()`")
        draft.cause = f"{made} drops the graph of what the loss is computed from, and the loss was {how}"
        ends = evidence.switched_off(cut.sites) if cut.name == "no_grad" else None
        ends = ends or evidence.at("cause", cut.sites, "the graph ends here")
    if ends is not None and forced:
        found, ends = ends, msgspec.structs.replace(found, role="origin")
    elif ends is not None:
        ends = msgspec.structs.replace(ends, role="origin") if ends.line != found.line else None
    draft.at(found, ends, evidence.backward_call(graph, "surfaced", "ends at once"))
    draft.because("the tensor that backward was called on has no `grad_fn`, and no optimizer holds it")
    if cut is not None and cut.name in CHOOSING:
        draft.help(f"compute the loss from the scores themselves: {made} has no gradient", safety="changes-training")
    elif cut is not None and cut.name == "no_grad":
        draft.help("compute the loss with gradients switched on, and do not make it a leaf", safety="changes-training")
    elif forced:
        draft.help("remove `requires_grad_()`: the error that torch raises then leads to what cut the graph")
    else:
        draft.help("call backward on the tensor that the loss function returned; use `item()` only for what is shown")
    return draft.about(step=graph.step)


def _cut(graph: LossGraph, evidence: CheckUp) -> Cut | None:
    """What took the graph from the values that the loss is computed from; None where there are several such lines."""
    trained = {id(tensor) for tensor in evidence.optimized}
    cuts = [cut for cut in graph.lost_terms.cuts if cut.sites and cut.behind & trained] if graph.lost_terms else []
    owner = value_of_call("backward", *graph.key)
    flow = parts_behind((owner,)) if owner is not None else []
    cuts = [cut for cut in cuts if any(part.covers(spot_of(site)) for site in cut.sites for part in flow)]
    return cuts[0] if len({_place(cut, evidence) for cut in cuts}) == 1 else None


def _place(cut: Cut, evidence: CheckUp) -> tuple[str, int | None]:
    """The line that a cut is mended at: several calls may be under one `no_grad`, or in one expression."""
    switch = evidence.switched_off(cut.sites) if cut.name == "no_grad" else None
    spot = spot_of(cut.sites[0])
    return (switch.file, switch.line) if switch is not None else (spot.file, spot.line)


def _made_at(graph: LossGraph, evidence: CheckUp) -> tuple[Location, bool]:
    """The last statement before backward that forces or makes the loss, and whether it forces it."""
    file, line = graph.key
    before = [node for node in evidence.statements(graph) if node.lineno <= line]
    before.sort(key=lambda node: node.lineno)
    owners = [owner for node in before if node.lineno == line for owner in _backward_owner(node)]
    name = owners[-1] if owners else None
    label = "made a leaf here, without a connection to the model"
    for node in reversed(before):
        part = _forces(node, name)
        if part is not None:
            return node_location("cause", file, part, label), True
        if name is not None and _assigns(node, name):
            where, made = _made_in_function(node) or (file, node)
            forced = _calls_forcing(made.value if isinstance(made, ast.Assign | ast.AnnAssign) else made)
            forced = forced or (isinstance(made, ast.stmt) and _forces(made, None) is not None)
            return node_location("cause", where, made, label), forced
    return evidence.backward_call(graph, "cause", label), False


def _made_in_function(statement: ast.stmt) -> tuple[str, ast.AST] | None:
    """What makes a leaf inside of a function that a statement calls; None where it cannot be told which."""
    if any(map(_is_leaf_made, ast.walk(statement))):
        return None
    called = {callee(node) for node in calls_in(statement)}
    made = [
        (file, function.name, node)
        for file, tree in user_trees()
        for function in nodes_in(tree)
        if isinstance(function, FUNCTIONS)
        for node in own_nodes(function)
        if _is_leaf_made(node)
    ]
    for names in (called, {"forward", "__call__"}):
        fitting = [(file, node) for file, name, node in made if name in names]
        if fitting:
            return fitting[0] if len(fitting) == 1 else None
    return None


def _is_leaf_made(node: ast.AST) -> bool:
    """Whether this is `tensor(..., requires_grad=True)`, `requires_grad_()` or `loss.requires_grad = True`."""
    if isinstance(node, ast.stmt) and _forces(node, None) is not None:
        return True
    if not isinstance(node, ast.Call):
        return False
    wanted = (isinstance(each.value, ast.Constant) and each.value.value is True for each in node.keywords)
    named = (each.arg == "requires_grad" for each in node.keywords)
    return callee(node) == "requires_grad_" or any(a and b for a, b in zip(named, wanted, strict=True))


def _backward_owner(node: ast.stmt) -> list[str]:
    """`loss` of `loss.backward()`, also inside of `scaler.scale(loss).backward()`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "backward":
            owner = part.func.value
            if isinstance(owner, ast.Call) and len(owner.args) == 1 and isinstance(owner.args[0], ast.Name):
                owner = owner.args[0]
            if isinstance(owner, ast.Name | ast.Attribute):
                return [ast.unparse(owner)]
    return []


def _forces(node: ast.stmt, name: str | None) -> ast.AST | None:
    """`loss.requires_grad_()` and `loss.requires_grad = True`, as statements of their own."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="requires_grad_", value=owner))):
            return node.value if name is None or ast.unparse(owner) == name else None
        case ast.Assign(targets=[ast.Attribute(attr="requires_grad", value=owner)], value=ast.Constant(value=True)):
            return node if name is None or ast.unparse(owner) == name else None
    return None


def _calls_forcing(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "requires_grad_"


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple | ast.List) else [each])]
    return any(ast.unparse(part) == name for part in parts)
