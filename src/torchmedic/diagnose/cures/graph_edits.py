"""Candidate cures for a graph that is cut, freed too early or carried on too long."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.diagnose.cures.edits import Candidate, called, rewritten, statement_at
from torchmedic.replay.step.trial import Edit
from torchmedic.replay.trace.microscope import Spot
from torchmedic.source.assignments import assigned
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import FUNCTIONS, callee, has_line, innermost, nodes_in, syntax_tree

_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def uses_in(spot: Spot, name: str) -> list[ast.expr]:
    """Where the statement at a spot reads a variable, in order."""
    statement = statement_at(spot)
    found = [
        node
        for node in nodes_in(statement)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == name
    ]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def reads_before(spot: Spot, name: str) -> list[Spot]:
    """The assignments before a spot, in the same function, that read a variable; the last one first."""
    function = innermost(syntax_tree(spot.file), spot.line, FUNCTIONS)
    found = [
        spot_of_node(spot.file, node, spot.function)
        for node in nodes_in(function)
        if isinstance(node, ast.Assign) and node.lineno < spot.line
    ]
    return [each for each in sorted(found, key=lambda each: -each.line) if uses_in(each, name)]


def detached_in(spot: Spot, name: str, *, is_item: bool = False) -> Iterator[Edit]:
    """The statement at a spot with a variable, or its items, taken without history."""
    statement = statement_at(spot)
    if isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) == name and not is_item:
        sign = _SIGNS.get(type(statement.op))
        if sign is not None:
            text = f"{name} = {name}.detach() {sign} {rewritten(spot.file, statement.value)}"
            yield Edit(spot_of_node(spot.file, statement, spot.function), text)
    for use in uses_in(spot, name)[:1]:
        place = spot_of_node(spot.file, use, spot.function)
        texts = [f"{name}.detach()"]
        if is_item:
            texts = [f"tuple(part.detach() for part in {name})", f"[part.detach() for part in {name}]"]
        if _is_none_at_first(spot, name) and not _is_chosen(statement, use, name):
            is_argument = any(use in call.args for call in nodes_in(statement) if isinstance(call, ast.Call))
            texts = [f"None if {name} is None else {text}" for text in texts]
            texts = texts if is_argument else [f"({text})" for text in texts]
        for text in texts:
            yield Edit(place, text)
    # A tuple of variables: `cell(x, (h, c))`.
    if not is_item and statement is not None:
        for node in ast.walk(statement):
            loaded = isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load)
            if loaded and any(ast.unparse(part) == name for part in node.elts):  # type: ignore[attr-defined]
                items = ", ".join(f"{ast.unparse(part)}.detach()" for part in node.elts)  # type: ignore[attr-defined]
                yield Edit(spot_of_node(spot.file, node, spot.function), f"({items})")  # type: ignore[arg-type]


def _is_chosen(statement: ast.stmt | None, use: ast.expr, name: str) -> bool:
    """Whether `h if h is not None else ...` decides already."""
    choices = [node for node in nodes_in(statement) if isinstance(node, ast.IfExp)]
    return any(use in (node.body, node.orelse) and name in ast.unparse(node.test) for node in choices)


def _is_none_at_first(spot: Spot, name: str) -> bool:
    """Whether the file gives a variable or a parameter None: before the first step there is nothing to detach."""
    for node in nodes_in(syntax_tree(spot.file)):
        match node:
            case ast.Assign() | ast.AnnAssign():
                if any(
                    ast.unparse(value) == "None" and ast.unparse(target) == name for target, value in assigned(node)
                ):
                    return True
            case ast.arguments(args=[*_, last], defaults=[*_, ast.Constant(value=None)]) if last.arg == name:
                return True
    return False


def retained(spot: Spot, *, differentiable: bool) -> Iterator[Candidate]:
    """Keep the graph of a call of backward or `autograd.grad` for the next one."""
    call = call_at(spot, "backward", "grad")
    if call is None:
        return
    if differentiable:
        yield "let the gradient be differentiated again", with_keyword(spot, call, "create_graph")
    yield "keep the graph of the first backward for the second", with_keyword(spot, call, "retain_graph")


def call_at(spot: Spot, *names: str) -> ast.Call | None:
    """The call of one of these functions or methods in the statement at a spot."""
    statement = statement_at(spot)
    for node in nodes_in(statement):
        if isinstance(node, ast.Call) and has_line(node, spot.line) and callee(node) in names:
            return node
    return None


def with_keyword(spot: Spot, call: ast.Call, name: str, value: str = "True") -> Edit:
    """A call with a keyword argument added or changed."""
    given = next((word for word in call.keywords if word.arg == name), None)
    if given is not None:
        text = rewritten(spot.file, call, [(given.value, value)])
    else:
        text = rewritten(spot.file, call).removesuffix(")").rstrip().removesuffix(",")
        text += f"{', ' if call.args or call.keywords else ''}{name}={value})"
    return Edit(spot_of_node(spot.file, call, spot.function), text)


def uncut(spot: Spot, name: str) -> Iterator[Candidate]:
    """The expression at a spot without the call that cuts the graph."""
    tree = syntax_tree(spot.file)
    for node in nodes_in(tree):
        if isinstance(node, ast.expr) and _is_at(node, spot):
            for title, text in _uncut(spot.file, node, name):
                yield title, Edit(spot_of_node(spot.file, node, spot.function), text)


def _uncut(file: str, node: ast.expr, name: str) -> Iterator[tuple[str, str]]:
    """Titles, and the source of an expression that does the same without the cut."""
    match node:
        case ast.Call(keywords=named) if name == "grad" and not any(each.arg == "create_graph" for each in named):
            text = rewritten(file, node)
            yield "pass `create_graph=True`", f"{text[:-1].rstrip().rstrip(',')}, create_graph=True)"
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr == name and not _is_torch(owner):
            yield f"leave `.{name}()` out", rewritten(file, owner)
        case ast.Attribute(value=owner, attr="data") if name in ("data", "detach"):
            yield "leave `.data` out", rewritten(file, owner)
        case ast.Call(func=function, args=[inner, *_]) if _builds(function) or ast.unparse(function) == "float":
            text = rewritten(file, inner)
            if not isinstance(inner, ast.List | ast.Tuple):
                yield f"leave `{ast.unparse(function)}(...)` out", called(text, inner)
            if _builds(function):
                yield "stack the tensors instead of copying their values", f"torch.stack({text})"


def _builds(function: ast.expr) -> bool:
    return ast.unparse(function).rpartition(".")[2] in ("tensor", "as_tensor", "Tensor", "FloatTensor", "Variable")


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "F", "np", "numpy")


def _is_at(node: ast.expr, spot: Spot) -> bool:
    if spot.column is None or spot.end_column is None:
        return node.lineno == spot.line
    start, end = (spot.line, spot.column), (spot.end_line or spot.line, spot.end_column)
    return start <= (node.lineno, node.col_offset) and (node.end_lineno or 0, node.end_col_offset or 0) <= end


def with_gradients(file: str, head: ast.expr) -> Iterator[Candidate]:
    """`with torch.no_grad():` becomes `with torch.enable_grad():`."""
    spot = spot_of_node(file, head)
    yield "let the block record gradients", Edit(spot, "torch.enable_grad()")


def not_reentrant(spot: Spot) -> Iterator[Candidate]:
    """A checkpoint that records its inputs itself."""
    call = call_at(spot, "checkpoint", "checkpoint_sequential")
    if call is not None:
        yield "use the checkpoint that is not reentrant", with_keyword(spot, call, "use_reentrant", "False")
